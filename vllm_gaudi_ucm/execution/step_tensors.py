"""The tensors that a step's model forward reads: one table, at true shapes and padded to a bucket.

An entry describes a tensor: its values in a planned step, its size in a bucket, its pad. Entries of `RowInput`s come
first, followed by those of each KV-cache group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.row_input import RowInput, RowInputs
from vllm_gaudi_ucm.batch.row_tiles import row_tiles
from vllm_gaudi_ucm.execution.step_sizes import (
    Sizes,
)
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, is_bounded, levels
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
)
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import (
    SelectionTensors,
)

NO_GROUP = -1


Parts = tuple[str, ...]


def group_suffix(number: int) -> str:
    """Returns the suffix of the names of a group's tensors and parts; number: its place among the groups."""
    return f".{number}" if number else ""


def of_group(tensors: Mapping[str, torch.Tensor], number: int) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of one group by their plain names, together with the tensors common to all groups."""
    if not number:
        # names of the first group are plain, and it does not read the others
        return tensors
    end = group_suffix(number)
    own = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
    common = {name: tensors[name] for name in ("positions", "groups", "tiles") if name in tensors}
    return {**common, **own}


class StepArrays(NamedTuple):
    """A planned step, in the form that entries of the table read.

    shape: the shape in which it runs: a bucket's shape, or its own. block_ids: if the unique part reads a slice of the
    cache, the place of each of its entries there; None if it gathers blocks.
    """

    step: PlannedStep
    shape: ForwardShape
    block_ids: NDArray[np.int64] | None = None

    @property
    def plan(self) -> UnifiedPlan:
        return self.step.plan

    @property
    def summary_blocks(self) -> NDArray[np.int64]:
        return self.step.summaries

    @property
    def parts(self) -> Parts:
        found = ["rows"]
        if len(self.summary_blocks):
            found.append("summaries")
        if self.plan.selection is not None:
            found.append("selection")
        for number, group in enumerate(self.plan.groups):
            end = group_suffix(number)
            found += [part + end for part in group.parts]
        if self.block_ids is None and "unique" in found:
            found[found.index("unique")] = "gathered unique"
        return tuple(found)


@dataclass(frozen=True)
class StepTensor:
    """One tensor of a step.

    name: name by which the forward finds it.
    values: returns its real entries in a planned step that has its part.
    size: returns its shape in a bucket; None if the bucket has no such tensor.
    pad: fills up a bucket, or all of it if the step lacks the part: a number, or an array of the size.
    parts: it exists in steps with one of these parts.
    dtype: dtype at true shape. In a bucket all tensors are int64, because they are pieces of one.
    by_block: if the unique part reads a slice of the cache, entry b is for physical block b.
    only: the one way of running that has it; in the other it is a constant, or not needed.
    is_input: whether the model's forward reads it; see RowInput.
    """

    name: str
    values: Callable[[StepArrays], NDArray[Any]]
    size: Callable[[Sizes], tuple[int, ...] | None]
    pad: int | Callable[[Sizes], int | NDArray[np.int64]] = 0
    parts: tuple[str, ...] = ("rows",)
    dtype: type[np.integer[Any]] = np.int64
    by_block: bool = False
    only: Literal["bucket", "true shape"] | None = None
    is_input: bool = False

    def at_true_shape(self, step: StepArrays) -> NDArray[Any]:
        """Returns only the values, without pads."""
        found = self.values(step)
        if self.by_block and step.block_ids is not None:
            # a block of the slice that no row uses has an empty range
            found, used = np.zeros(step.shape.unique_blocks, self.dtype), found
            found[step.block_ids] = used
        return found if found.dtype == self.dtype else found.astype(self.dtype)

    def fill(self, whole: NDArray[np.int64], step: StepArrays, pad: int | NDArray[np.int64]) -> None:
        """Writes the values and the pad into a bucket's array."""
        values = self.values(step)
        if self.by_block and step.block_ids is not None:
            whole[...] = pad
            whole[step.block_ids] = values
        elif whole.ndim == 1:
            count = len(values)
            whole[:count] = values
            whole[count:] = pad
        else:
            whole[...] = pad
            whole[: values.shape[0], : values.shape[1]] = values


def place_tiles(plan: UnifiedPlan | None, shape: ForwardShape) -> NDArray[np.int64]:
    """Returns [2, tiles] the first and last row of each tile."""
    rows, most = shape.query_len, shape.max_prompt_tiles
    return np.stack(row_tiles(plan).places(rows, levels(rows, most)[0]))


def input_tensors(inputs: RowInputs) -> tuple[StepTensor, ...]:
    """Returns the entries of the model's inputs for each row."""
    return tuple(_input_tensor(kind) for kind in inputs)


def _input_tensor(kind: type[RowInput]) -> StepTensor:
    return StepTensor(
        kind.name,
        lambda step: step.step.inputs[kind.name],
        lambda sizes: kind.shape(sizes.shape.query_len),
        kind.pad,
        dtype=kind.dtype,
        is_input=True,
    )


def input_names(table: Sequence[StepTensor]) -> list[str]:
    """Returns the names of the entries that a model's forward reads."""
    return [entry.name for entry in table if entry.is_input]


class StepInputs(NamedTuple):
    """The inputs of a step's forward. Rows are query tokens in flat order.

    rows: int64 [rows] of each `RowInput`, or [columns, rows], by its name; token ids and positions are among them.
    groups: inputs of the layers of each KV-cache group, made by its kind (`CacheGroup`). The first is an attention
    group.
    summary_blocks: int64 [blocks] to be summarised, if a sparse method is on.
    selection: the choices of the step, if it has any.
    """

    rows: dict[str, torch.Tensor]
    groups: tuple[Any, ...]
    summary_blocks: torch.Tensor | None
    selection: SelectionTensors | None

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, torch.Tensor],
        groups: Sequence[Any],
        choices: SelectionLimits | None,
        inputs: Sequence[str],
    ) -> StepInputs:
        """Makes the inputs. groups: for attention, but the selected part. choices: if any. inputs: names of `rows`."""
        selection = None
        if choices is not None:
            selection = SelectionTensors.from_tensors(tensors, choices)
            first, *others = groups
            groups = (first._replace(parts=first.parts._replace(selected=selection.chosen_part())), *others)
        rows = {name: tensors[name] for name in inputs}
        return cls(rows, tuple(groups), tensors.get("summary_blocks"), selection)

    @property
    def slots(self) -> torch.Tensor:
        """Returns int64 [rows], the slots of the first group."""
        slots: torch.Tensor = self.groups[0].slots
        return slots

    @property
    def parts(self) -> AttentionParts:
        """Returns the parts of attention of the first group."""
        parts: AttentionParts = self.groups[0].parts
        return parts

    @property
    def token_ids(self) -> torch.Tensor:
        return self.rows["token_ids"]

    @property
    def positions(self) -> torch.Tensor:
        return self.rows["positions"]

    def with_tokens(self, token_ids: torch.Tensor) -> StepInputs:
        return self._replace(rows={**self.rows, "token_ids": token_ids})


def true_shape(plan: UnifiedPlan, unique_blocks: int) -> Bucket:
    """Returns the bucket of a step before padding; `unique_blocks` counts the blocks that are read, in use or not."""
    return Bucket(
        phase=phase_string(plan.causal is not None, plan.shared is not None, plan.unique is not None),
        query_len=plan.num_rows,
        shared_blocks=0 if plan.shared is None else len(plan.shared.blocks),
        unique_blocks=unique_blocks,
        logits=len(plan.logits_rows),
        selected_blocks=0 if plan.selection is None else len(plan.selection.choice_spans),
        max_prompt_tiles=_least_tiles(plan),
    )


def _least_tiles(plan: UnifiedPlan) -> int:
    """Returns the least reach of a bucket that holds the step, if it is a tighter bound than the number of rows."""
    if plan.causal is None or not is_bounded(plan.num_rows, 1):
        return ALL_TILES
    least = row_tiles(plan).reach
    return least if is_bounded(plan.num_rows, least) else ALL_TILES
