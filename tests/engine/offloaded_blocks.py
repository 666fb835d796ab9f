"""A run of an engine in memory mode, with every block watched: what it should hold, and what nobody may read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import RequestOutput
from vllm.v1.request import RequestStatus

from tests.engine.serving import Engine, greedy_params
from vllm_gaudi_ucm.kv_cache.pair import in_blocks
from vllm_gaudi_ucm.memory_mode.scheduler_side import OffloadScheduler
from vllm_gaudi_ucm.protocol.attachments import sparse_meta_of


class WatchedEngine:
    """Steps an engine and checks both sides after each step.

    Free blocks that the prefix cache does not keep, and the null block, are overwritten with NaN after every step: a
    block that is away and attended would show in the logits. A full block does not change as long as it stays in its
    place. The first content of every full block is kept and compared with what stands in the table whenever the block
    is there.

    tolerance: where requests with the same prompts take each other's blocks, computed in other chunks, from the prefix
        cache or a store: largest difference of a prompt's block to its first content. Those of answers rest on the
        choices of sparse steps and are not compared. Neither are blocks of a prompt from the first one on that a sparse
        step has written (what is left of it after a partial load, a chunk of one token) for whichever request: what is
        found or stored for the same tokens may be that of a dense step, or of other choices. Either is a block of
        these tokens.
    """

    def __init__(self, engine: Engine, tolerance: float | None = None) -> None:
        self.engine = engine
        self._tolerance = tolerance
        self._caches = self._caches_of(self.offload._blocks.group)
        self._first: dict[tuple[int, int], torch.Tensor] = {}
        self._there: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._before = self._there
        self._chosen: set[bytes] = set()
        self._note_choices()
        self.steps = 0

    @property
    def offload(self) -> OffloadScheduler:
        found: OffloadScheduler = self.engine._core.scheduler.offload
        return found

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[RequestOutput]:
        """All prompts at once."""
        ids = [self.engine.new_id() for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.engine.add(request_id, prompt, greedy_params(max_tokens))
        return self.finish(ids)

    def finish(self, ids: Sequence[str]) -> list[RequestOutput]:
        """Steps until these requests have finished."""
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(ids):
            finished.update((output.request_id, output) for output in self.step() if output.finished)
        return [finished[request_id] for request_id in ids]

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.steps += 1
        self.offload.check_integrity()
        self._before, self._there = self._there, {}
        for state in list(self.offload._states.values()):
            self._check_request(state)
        self._poison()
        return outputs

    def _caches_of(self, group: int) -> list[torch.Tensor]:
        """Keys and values of its layers: a block has room for the largest group, and is one group's at a time."""
        parts = self.engine.runner.parts
        names = self.engine._core.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        return [blocks for name in names for blocks in in_blocks(parts.kv_caches[name], parts.block_size)]

    def _note_choices(self) -> None:
        """Keeps the hashes of full blocks that rest on choices of sparse steps."""
        scheduler = self.engine._core.scheduler
        schedule = scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id in sparse_meta_of(output).requests:
                request = scheduler.requests[request_id]
                start = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
                self._chosen.update(request.block_hashes[start // self.engine.runner.parts.block_size :])
            return output

        scheduler.schedule = noted

    def _check_request(self, state: Any) -> None:
        request = self.engine._core.scheduler.requests[state.request_id]
        row = self.engine.runner.parts.requests.requests.get(state.request_id)
        blocks = self.offload._blocks.table(state.request_id)
        # one that waits for a connector's load has blocks that the worker does not know of yet
        if row is None or not blocks or request.status != RequestStatus.RUNNING:
            return
        seen = self.engine.runner.parts.requests.blocks(state.request_id, len(blocks)).tolist()
        not_sent = {
            patch.number for patch in self.offload._moves.orders.patches if patch.generation == state.generation
        }
        block_size = self.engine.runner.parts.block_size
        places: list[tuple[int, int, bool]] = []
        for number in range(min(request.num_computed_tokens // block_size, len(blocks))):
            if number in not_sent:
                continue
            assert seen[number] == blocks[number].block_id, "both sides have the same table"
            if seen[number]:
                is_compared = self._tolerance is None or not self._rests_on_choices(request, number)
                places.append((number, seen[number], is_compared))
        if places:
            self._check_contents(state.generation, places)

    def _rests_on_choices(self, request: Any, number: int) -> bool:
        if number >= request.num_prompt_tokens // self.engine.runner.parts.block_size:
            return True
        return not self._chosen.isdisjoint(request.block_hashes[: number + 1])

    def _check_contents(self, generation: int, places: Sequence[tuple[int, int, bool]]) -> None:
        """places: of a state, logical blocks, their device blocks, and whether they are compared."""
        contents = contents_of(self._caches, [block for _, block, _ in places]).float()
        stayed: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        compared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for (number, block, is_compared), found in zip(places, contents, strict=True):
            place, name = (generation, number), f"block {number} of state {generation}"
            self._there[place] = block, found
            before = self._before.get(place)
            if before is not None and before[0] == block:
                stayed.append((name, found, before[1]))
            if is_compared:
                if place not in self._first:
                    self._first[place] = found.clone()
                compared.append((name, found, self._first[place]))
        check_same(stayed, "was written where it stays")
        check_same(compared, "has changed", self._tolerance or 0.0)

    def _poison(self) -> None:
        pool = self.engine._core.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.blocks if block.ref_cnt <= 0 and block.block_hash is None]
        waiting = {block.block_id for state in self.offload._states.values() for block in state.loading.values()}
        assert not waiting & set(free)
        self.engine.poison(sorted({0, *free}))


def contents_of(caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
    """A copy of what these blocks hold, [blocks, caches, block size, kv heads, head size]."""
    index = torch.tensor(blocks, dtype=torch.int64)
    return torch.stack([cache[index] for cache in caches], 1)


def check_same(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]], what: str, tolerance: float = 0.0) -> None:
    """Of each name, its two tensors differ by no more; NaN is no small difference. what: is said of one that does."""
    if pairs:
        names, found, expected = zip(*pairs, strict=True)
        differences = (torch.stack(found) - torch.stack(expected)).abs().flatten(1).amax(1).tolist()
        for name, changed in zip(names, differences, strict=True):
            assert changed <= tolerance, f"{name} {what}, by {changed}"
