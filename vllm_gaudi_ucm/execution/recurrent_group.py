"""The layers of vLLM that keep a state for each request: Mamba-2 mixers and short convolutions, one group for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.cache_group import Tensors, ToDevice
from vllm_gaudi_ucm.execution.state_group import StateGroup, StatePlaces, StatePlan, StatePlanner
from vllm_gaudi_ucm.execution.step_sizes import Sizes, of_rows
from vllm_gaudi_ucm.execution.step_tensors import StepArrays, StepTensor, group_suffix
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.state_rows import NO_ROW, TILE_ROWS, StateRows, most_tiles, plan_state_rows
from vllm_gaudi_ucm.state_layers.register import STATE_LAYERS
from vllm_gaudi_ucm.vllm_api.state_layers import MambaSpec

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, PlanOfGroup, UnifiedPlan
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.batch.group_planner import Planned
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.ops.unified_attention.api import Plan
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec

MOST_PROMPTS = 16
"""Requests of a padded step with more rows than a verification has. Each may fill its last tile with pads, so a bucket
has as many tiles more than its rows need."""


class RowsPlan(NamedTuple):
    """The arrays of `StateRows` of a step, by name."""

    arrays: dict[str, NDArray[np.int64]]

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


class RecurrentGroup(StateGroup):
    """States of running requests alone: those of a real model take megabytes, too many for each block.

    So a request begins with its first token; prefix caching is off.
    """

    spec = MambaSpec
    layer_classes = tuple(STATE_LAYERS.values())
    of_blocks = False

    @classmethod
    def states_of(cls, spec: KVCacheSpec) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        assert isinstance(spec, MambaSpec), "see `spec`"
        return list(zip(spec.shapes, spec.dtypes, strict=True))

    def make_planner(self, places: StatePlaces) -> RowsPlanner:
        return RowsPlanner(None, places)

    def tensors(self, number: int) -> tuple[StepTensor, ...]:
        end = group_suffix(number)

        def entry(name: str, size: Callable[[Sizes], tuple[int, ...] | None], pad: int) -> StepTensor:
            def values(step: StepArrays) -> NDArray[np.int64]:
                plan = step.plan.groups[number]
                assert isinstance(plan, RowsPlan), "made by the group's planner"
                return plan.arrays[name]

            return StepTensor(name + end, values, size, pad)

        return (
            entry("offsets", of_rows, 0),
            entry("row_sources", of_rows, DUMMY_BLOCK),
            entry("kept_rows", self._of_kept, 0),
            entry("kept_at", self._of_kept, DUMMY_BLOCK),
            # pads have the results of the first request's first row
            entry("places", of_rows, 0),
            entry("few_rows", self._of_few, NO_ROW),
            entry("few_sources", lambda sizes: (sizes.spans,), DUMMY_BLOCK),
            entry("few_targets", self._of_few, DUMMY_BLOCK),
            entry("tile_rows", lambda sizes: (self._tiles(sizes), TILE_ROWS), NO_ROW),
            entry("tile_sources", lambda sizes: (self._tiles(sizes),), DUMMY_BLOCK),
            entry("tile_targets", lambda sizes: (self._tiles(sizes),), DUMMY_BLOCK),
        )

    def _of_few(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.spans, self._rows_each

    def _tiles(self, sizes: Sizes) -> int:
        """Returns the tiles of a bucket; in one without causal attention all requests have a single row."""
        if "c" not in sizes.shape.phase:
            return 0
        return most_tiles(sizes.shape.query_len, min(sizes.spans - 1, MOST_PROMPTS), self._rows_each, 0)

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Divides a padded step so that no part has more prompts than a bucket has room for."""
        every = np.arange(len(batch.num_scheduled))
        prompts = (batch.num_scheduled > self._rows_each).cumsum()
        if room is None or not len(every) or prompts[-1] <= MOST_PROMPTS:
            return [every]
        part = np.maximum(prompts - 1, 0) // MOST_PROMPTS
        return [np.flatnonzero(part == number) for number in range(part[-1] + 1)]

    def at_true_shape(self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice) -> StateRows:
        return StateRows.from_tensors(tensors)

    def in_buckets(self, number: int, limits: Limits, causal_slice: int, device: torch.device) -> _InBuckets:
        return _InBuckets()

    def metadata(self, inputs: StateRows, implementation: str, plan: Plan | None) -> StateRows:
        return inputs


class _InBuckets:
    """Makes the rows of a step in buckets; see GroupInBuckets."""

    def make_inputs(self, shape: ForwardShape, tensors: Tensors) -> StateRows:
        return StateRows.from_tensors(tensors)

    def refill(self) -> None:
        """Does nothing, because the group has no tensors of its own."""


class RowsPlanner(StatePlanner):
    """Plans the rows of a step; see GroupPlanner."""

    def plan(self, batch: BatchInput, step: UnifiedPlan, planned: Planned) -> RowsPlan:
        found: StatePlan = self.plan_states(batch, step)
        few = self.places.rows_each
        return RowsPlan(
            plan_state_rows(step.query_start, found.sources, found.kept_rows, found.kept_at, null=DUMMY_BLOCK, few=few)
        )
