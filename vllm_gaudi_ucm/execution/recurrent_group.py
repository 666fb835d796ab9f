"""The layers of vLLM that keep a state for each request: Mamba-2 mixers, gated delta nets and short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.execution.state_group import StateGroup, StatePlaces, StatePlan, StatePlanner
from vllm_gaudi_ucm.execution.step_sizes import Sizes, of_rows
from vllm_gaudi_ucm.execution.step_tensors import StepArrays, StepTensor, group_suffix
from vllm_gaudi_ucm.ops.state_rows import NO_ROW, NULL_SLOT, TILE_ROWS, StateRows, most_tiles, plan_state_rows
from vllm_gaudi_ucm.state_layers.register import is_registered
from vllm_gaudi_ucm.vllm_api.kv_cache import MambaSpec

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.batch.group_planner import Planned
    from vllm_gaudi_ucm.batch.kv_group import KvGroup
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
    """States of running requests, and some for prefix caching: a state of a real model takes megabytes, too many for
    each block. See `block_policies.kept_states`.
    """

    spec = MambaSpec
    layer_classes = ()
    of_blocks = False
    inputs = StateRows

    @classmethod
    def serves(cls, layer_class: type) -> bool:
        return is_registered(layer_class)

    @classmethod
    def make(cls, kv: KvGroup, vllm_config: VllmConfig) -> RecurrentGroup:
        kept = resolve_config(vllm_config.additional_config).kv_cache.kept_states
        return cls(kv, vllm_config.scheduler_config.max_num_seqs, 1 + vllm_config.num_speculative_tokens, kept)

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
            entry("row_sources", of_rows, NULL_SLOT),
            entry("kept_rows", self._of_kept, 0),
            entry("kept_at", self._of_kept, NULL_SLOT),
            # pads have the results of the first request's first row
            entry("places", of_rows, 0),
            entry("few_rows", self._of_few, NO_ROW),
            entry("few_sources", lambda sizes: (sizes.spans,), NULL_SLOT),
            entry("few_targets", self._of_few, NULL_SLOT),
            entry("tile_rows", lambda sizes: (self._tiles(sizes), TILE_ROWS), NO_ROW),
            entry("tile_sources", lambda sizes: (self._tiles(sizes),), NULL_SLOT),
            entry("tile_targets", lambda sizes: (self._tiles(sizes),), NULL_SLOT),
        )

    def _of_few(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.spans, self._rows_each

    def _tiles(self, sizes: Sizes) -> int:
        """Returns the tiles of a bucket; in one without causal attention all requests have a single row."""
        if "c" not in sizes.shape.phase:
            return 0
        prompts = min(sizes.spans - 1, MOST_PROMPTS)
        # a tile ends behind a kept state
        return most_tiles(sizes.shape.query_len, prompts, self._rows_each, prompts if self._kept_states else 0)

    def _of_kept(self, sizes: Sizes) -> tuple[int, ...]:
        (own,) = super()._of_kept(sizes)
        return (own + (min(sizes.spans - 1, MOST_PROMPTS) if self._kept_states else 0),)

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Divides a padded step so that no part has more prompts than a bucket has room for."""
        every = np.arange(len(batch.num_scheduled))
        prompts = (batch.num_scheduled > self._rows_each).cumsum()
        if room is None or not len(every) or prompts[-1] <= MOST_PROMPTS:
            return [every]
        part = np.maximum(prompts - 1, 0) // MOST_PROMPTS
        return [np.flatnonzero(part == number) for number in range(part[-1] + 1)]


class RowsPlanner(StatePlanner):
    """Plans the rows of a step; see GroupPlanner. Kept states have the rows 1 and up."""

    _reads: Mapping[int, int] = MappingProxyType({})
    _keeps: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({})

    def begin_step(self, reads: Mapping[int, int], keeps: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Takes orders about kept states; see `KeepsStates`."""
        self._reads, self._keeps = reads, keeps

    def plan(self, batch: BatchInput, step: UnifiedPlan, planned: Planned) -> RowsPlan:
        found = self._with_kept(self.plan_states(batch, step), step)
        few = self.places.rows_each
        return RowsPlan(plan_state_rows(step.query_start, found.sources, found.kept_rows, found.kept_at, few=few))

    def _begin_with(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        zeros = self.places.zeros
        return np.array([self._reads.get(row, zeros) for row in rows.tolist()], np.int64)

    def _with_kept(self, plan: StatePlan, step: UnifiedPlan) -> StatePlan:
        """Adds the rows behind which states are kept for other requests."""
        if not self._keeps:
            return plan
        kept = [
            (int(step.query_start[place]) + tokens - 1 - int(step.positions[step.query_start[place]]), number)
            for place, row in enumerate(step.table_rows.tolist())
            for tokens, number in self._keeps.get(row, ())
        ]
        rows, numbers = np.array(kept, np.int64).reshape(-1, 2).T
        return plan._replace(
            kept_rows=np.concatenate([plan.kept_rows, rows]), kept_at=np.concatenate([plan.kept_at, numbers])
        )
