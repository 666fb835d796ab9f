"""The tensors that a step's model forward reads: one table, at true shapes and padded to a bucket.

An entry says what a tensor is: its values of a planned step, its size in a bucket, its pad. Those of `RowInput`s come
first, then those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import NO_BLOCKS, PlannedStep
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInput, RowInputs
from vllm_gaudi_ucm.batch.row_tiles import row_tiles
from vllm_gaudi_ucm.execution.group_names import Parts, group_suffix, parts_of_others
from vllm_gaudi_ucm.execution.step_sizes import (
    Sizes,
    of_causal_rows,
    of_first_tokens,
    of_rows,
    of_shared_blocks,
    of_shared_lo,
    of_tiles,
    of_unique_blocks,
    of_unique_lo,
)
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, is_bounded, levels
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
)
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import (
    CANDIDATE_ARRAYS,
    CHOICE_ARRAYS,
    SPAN_ARRAYS,
    SelectionTensors,
    pad_values,
)

NO_GROUP = -1


class StepArrays(NamedTuple):
    """A planned step, as entries of the table read it.

    shape: what it runs in: a bucket's shape, or its own. block_ids: where the unique part reads a slice of the cache,
    the place of each of its entries there; None: it gathers blocks.
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
        """What the step has; see StepTensor."""
        plan = self.plan
        common = (
            "rows",
            None if plan.unique is None else "gathered unique" if self.block_ids is None else "unique",
            None if plan.causal is None else "causal",
            None if plan.shared is None else "shared",
            "summaries" if len(self.summary_blocks) else None,
            None if plan.selection is None else "selection",
        )
        return common if len(plan.groups) == 1 else (*common, *parts_of_others(plan.groups))


@dataclass(frozen=True)
class StepTensor:
    """One tensor of a step.

    name: by which the forward finds it.
    values: its real entries in a planned step that has its part.
    size: its shape in a bucket; None: the bucket has no such tensor.
    pad: what fills a bucket up, or all of it where the step lacks the part: a number, or an array of the size.
    parts: it exists in steps with one of these parts.
    dtype: at true shape. In a bucket all tensors are int64, for they are pieces of one.
    by_block: where the unique part reads a slice of the cache, entry b speaks of physical block b.
    only: the one way of running that has it; in the other it is a constant, or not needed.
    is_input: the model's forward reads it; see RowInput.
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
        """The values alone."""
        found = self.values(step)
        if self.by_block and step.block_ids is not None:
            # a block of the slice that no row uses keeps an empty range
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


def _place_tiles(plan: UnifiedPlan | None, shape: ForwardShape) -> NDArray[np.int64]:
    """[2, tiles] first and last row of each tile."""
    rows, most = shape.query_len, shape.causal_reach
    return np.stack(row_tiles(plan).places(rows, levels(rows, most)[0]))


def _rise(step: StepArrays) -> NDArray[np.int64]:
    shared = step.plan.shared
    return of_window(None if shared is None else shared.rise)


def _first_rows(step: StepArrays) -> NDArray[np.int64]:
    causal = step.plan.causal
    return of_window(None if causal is None else causal.first_rows)


def of_window(found: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """A tensor of a window's plan; where the window hides nothing from a step pads do it all."""
    return NO_BLOCKS if found is None else found


def _selection_tensor(name: str, size: Callable[[SelectionLimits, ForwardShape], int]) -> StepTensor:
    def in_bucket(sizes: Sizes) -> tuple[int, ...] | None:
        if not sizes.shape.selected_blocks:
            return None
        assert sizes.choices is not None, "selected blocks without a sparse method"
        return (size(sizes.choices, sizes.shape),)

    def pad(sizes: Sizes) -> int:
        assert sizes.choices is not None
        return pad_values(sizes.choices.spans(sizes.shape.query_len), sizes.choices)[name]

    return StepTensor(name, attrgetter(f"plan.selection.{name}"), in_bucket, pad, ("selection",))


_UNIQUE = ("unique", "gathered unique")

PLAN_TENSORS: tuple[StepTensor, ...] = (
    StepTensor("slots", attrgetter("plan.slots"), of_rows, DUMMY_BLOCK),
    StepTensor("groups", attrgetter("plan.causal.groups"), of_causal_rows, NO_GROUP, ("causal",), np.int32),
    StepTensor(
        "tiles",
        lambda step: _place_tiles(step.plan, step.shape),
        of_tiles,
        lambda sizes: _place_tiles(None, sizes.shape),
        only="bucket",
    ),
    StepTensor("shared_blocks", attrgetter("plan.shared.blocks"), of_shared_blocks, DUMMY_BLOCK, ("shared",)),
    StepTensor(
        "row_spans",
        attrgetter("plan.row_requests"),
        lambda sizes: of_rows(sizes) if sizes.shape.shared_blocks else None,
        # rows that are no request's
        lambda sizes: sizes.spans - 1,
        ("shared",),
    ),
    StepTensor("shared_lo", attrgetter("plan.shared.lo"), of_shared_lo, 0, ("shared",), np.int32),
    StepTensor(
        "shared_rise",
        _rise,
        lambda sizes: of_rows(sizes) if sizes.shape.shared_blocks and sizes.limits.window else None,
        0,
        ("shared",),
        only="bucket",
    ),
    StepTensor(
        "causal_first_rows",
        _first_rows,
        lambda sizes: of_causal_rows(sizes) if sizes.limits.window else None,
        0,
        ("causal",),
        only="bucket",
    ),
    StepTensor(
        "shared_hi",
        attrgetter("plan.shared.hi"),
        lambda sizes: (sizes.spans, sizes.shape.shared_blocks) if sizes.shape.shared_blocks else None,
        0,
        ("shared",),
        np.int32,
    ),
    StepTensor("shared_from", attrgetter("plan.shared.first_tokens"), of_first_tokens, 0, ("shared",), only="bucket"),
    StepTensor(
        "unique_blocks",
        attrgetter("plan.unique.blocks"),
        lambda sizes: None if sizes.limits.contiguous else of_unique_blocks(sizes),
        DUMMY_BLOCK,
        ("gathered unique",),
    ),
    StepTensor("unique_rows", attrgetter("plan.unique.rows"), of_unique_blocks, 0, _UNIQUE, by_block=True),
    StepTensor("unique_lo", attrgetter("plan.unique.lo"), of_unique_lo, 0, _UNIQUE, np.int32, by_block=True),
    StepTensor("unique_hi", attrgetter("plan.unique.hi"), of_unique_blocks, 0, _UNIQUE, np.int32, by_block=True),
    StepTensor(
        "summary_blocks",
        attrgetter("summary_blocks"),
        lambda sizes: None if sizes.choices is None else (sizes.choices.summaries(sizes.shape.query_len),),
        DUMMY_BLOCK,
        ("summaries",),
    ),
    *(_selection_tensor(name, lambda choices, shape: choices.spans(shape.query_len)) for name in SPAN_ARRAYS),
    *(
        _selection_tensor(name, lambda choices, shape: choices.candidates(shape.query_len, shape.selected_blocks))
        for name in CANDIDATE_ARRAYS
    ),
    *(_selection_tensor(name, lambda choices, shape: shape.selected_blocks) for name in CHOICE_ARRAYS),
)


def input_tensors(inputs: RowInputs) -> tuple[StepTensor, ...]:
    """Returns the entries of what a model reads of each row."""
    return tuple(_input_tensor(kind) for kind in inputs)


def _input_tensor(kind: type[RowInput]) -> StepTensor:
    name, columns = kind.name, kind.columns

    def size(sizes: Sizes) -> tuple[int, ...]:
        return of_rows(sizes) if columns is None else (columns, *of_rows(sizes))

    return StepTensor(name, lambda step: step.step.inputs[name], size, kind.pad, dtype=kind.dtype, is_input=True)


STEP_TENSORS = (*input_tensors(BUILT_IN_INPUTS), *PLAN_TENSORS)
"""The tensors of a model with one KV-cache group that reads only token ids and positions."""


def input_names(table: Sequence[StepTensor]) -> list[str]:
    """Returns the names of the entries that a model's forward reads."""
    return [entry.name for entry in table if entry.is_input]


class GroupInputs(NamedTuple):
    """slots: int64 [rows], of a KV-cache group. parts: of its attention."""

    slots: torch.Tensor
    parts: AttentionParts


class StepInputs(NamedTuple):
    """What the forward of a step reads. Rows are query tokens in flat order.

    rows: int64 [rows] of each `RowInput`, or [columns, rows], by its name; token ids and positions are among them.
    slots: int64 [rows].
    summary_blocks: int64 [blocks] to be summarised, where a sparse method is on.
    selection: the choices of the step, where it has any.
    groups: what layers of the KV-cache groups behind the first read in place of slots and parts.
    """

    rows: dict[str, torch.Tensor]
    slots: torch.Tensor
    parts: AttentionParts
    summary_blocks: torch.Tensor | None
    selection: SelectionTensors | None
    groups: tuple[GroupInputs, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: dict[str, torch.Tensor],
        parts: AttentionParts,
        choices: SelectionLimits | None,
        inputs: Sequence[str],
        groups: Sequence[AttentionParts] = (),
    ) -> StepInputs:
        """parts: without the selected one. choices: of a step that has any. inputs: names of `rows`. groups: the parts
        of those behind the first."""
        selection = None
        if choices is not None:
            selection = SelectionTensors.of(tensors, choices)
            parts = parts._replace(selected=selection.chosen_part())
        more = tuple(GroupInputs(tensors[f"slots{group_suffix(k)}"], own) for k, own in enumerate(groups, 1))
        rows = {name: tensors[name] for name in inputs}
        return cls(rows, tensors["slots"], parts, tensors.get("summary_blocks"), selection, more)

    @property
    def token_ids(self) -> torch.Tensor:
        return self.rows["token_ids"]

    @property
    def positions(self) -> torch.Tensor:
        return self.rows["positions"]

    def with_tokens(self, token_ids: torch.Tensor) -> StepInputs:
        """Returns the same step of other tokens."""
        return self._replace(rows={**self.rows, "token_ids": token_ids})


def true_shape(plan: UnifiedPlan, unique_blocks: int) -> Bucket:
    """The bucket of a step before any padding; `unique_blocks` counts those that are read, in use or not."""
    return Bucket(
        phase=phase_string(plan.causal is not None, plan.shared is not None, plan.unique is not None),
        query_len=plan.num_rows,
        shared_blocks=0 if plan.shared is None else len(plan.shared.blocks),
        unique_blocks=unique_blocks,
        logits=len(plan.logits_rows),
        selected_blocks=0 if plan.selection is None else len(plan.selection.choice_spans),
        causal_reach=_least_tiles(plan),
    )


def _least_tiles(plan: UnifiedPlan) -> int:
    """The least of a bucket that holds the step, where that says more than its number of rows."""
    if plan.causal is None or not is_bounded(plan.num_rows, 1):
        return ALL_TILES
    least = row_tiles(plan).reach
    return least if is_bounded(plan.num_rows, least) else ALL_TILES
