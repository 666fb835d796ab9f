"""Keeps blocks of preempted requests in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Hit, Turn
from vllm_gaudi_ucm.block_policies.swap.swap_cost import SwapCost
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals, link_speed_of
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes, skipped_tokens
from vllm_gaudi_ucm.vllm_api.platforms import keeps_states
from vllm_gaudi_ucm.vllm_api.stage_layers import engine_block_bytes

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput

logger = plugin_logger(__name__)


Pairs = list[tuple[int, int]]
Tables = Sequence[Sequence["KVCacheBlock"]]
"""Blocks of a request in each KV-cache group, in the order of its context; null blocks before a window."""


class HostSlots:
    """The numbers of slots, each for one block of all layers and workers."""

    def __init__(self, count: int) -> None:
        self.count = count
        # the lowest first: memory is taken from the system as slots are used
        self._free = list(range(count))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Takes that many slots; returns None if fewer are free."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, slots: Sequence[int]) -> None:
        self._free.extend(reversed(slots))

    def check_integrity(self, held: Sequence[int]) -> None:
        """Checks that every slot is either free or held, and only once."""
        if sorted([*self._free, *held]) != list(range(self.count)):
            raise AssertionError(f"host slots: {self.count}, free {sorted(self._free)}, held {sorted(held)}")


class _Preempted(NamedTuple):
    """tokens: number of computed tokens. places: (group, number in the context) -> slot; empty if given up.

    states: its place for states, if layers keep some and `places` is not empty.
    """

    tokens: int
    places: dict[tuple[int, int], int]
    states: tuple[int, ...] = ()

    @property
    def slots(self) -> list[int]:
        return list(self.places.values())


def _nothing(tokens: int) -> int:
    return 0


class Swaps(BlockPolicy):
    """Copies blocks out when a request is preempted, and copies those back that it does not find when it resumes.

    All of its blocks are copied out, even those in the prefix cache, which may be gone when it resumes. Then blocks of
    the prefix cache come first, and the rest from host memory. In a KV-cache group with a window, only the blocks that
    the next token sees are copied.

    Args:
        slots: slots in host memory, each for a block of any group.
        block_bytes: bytes in all layers of a group, on all workers.
        always: whether a request is swapped at any cost.
        skipped: for each group, maps the number of computed tokens to the number of first tokens that no later token
            sees.
        states: places in host memory, each for the states of a request; None if no layer keeps a state.
    """

    name = "swap"
    brings_tokens = True

    def __init__(
        self,
        slots: HostSlots,
        block_size: int,
        block_bytes: int,
        cost: SwapCost,
        always: bool,
        totals: MemoryTotals,
        skipped: Sequence[Callable[[int], int]] = (_nothing,),
        states: HostSlots | None = None,
    ) -> None:
        self._slots = slots
        self._states = states
        self._skipped = skipped
        self._block_size = block_size
        self._block_bytes = block_bytes
        self.cost = cost
        self._always = always
        self._totals = totals
        self._waiting: dict[str, _Preempted] = {}
        self._outs: Pairs = []
        self._ins: Pairs = []
        self._state_outs: list[tuple[str, int]] = []
        self._state_ins: list[tuple[int, str]] = []
        # slots of requests that resume in the step being scheduled, which reads them
        self._leaving: list[int] = []
        self._leaving_states: list[int] = []

    def preempted(self, request: Request, tables: Tables) -> None:
        """Called when a request is about to lose its blocks; `num_computed_tokens` excludes this step."""
        self.drop(request.request_id)
        tokens = request.num_computed_tokens
        # the first token that is computed again may be the last one of the request
        seen = min(tokens, max(request.num_tokens - 1, 0))
        held = {
            (group, number): blocks[number]
            for group, blocks in enumerate(tables)
            for number in self._numbers(group, seen, tokens)
        }
        wants = self._always or self.cost.prefers_swap(tokens, len(held), *_shared(tables, held))
        if not (held and wants and _can_resume(request)):
            self._waiting[request.request_id] = _Preempted(tokens, {})
            return
        states = () if self._states is None else self._states.take(1)
        places = {} if states is None else self._take(held)
        if self._states is not None and states:
            if places:
                self._state_outs.append((request.request_id, states[0]))
            else:
                self._states.give(states)
                states = ()
        if states is None:
            self._totals.swap_refusals += 1
        self._waiting[request.request_id] = _Preempted(tokens, places, states or ())

    def _numbers(self, group: int, seen: int, tokens: int) -> range:
        """Returns the blocks of a context of `tokens` that a token after the first `seen` ones sees."""
        return range(self._skipped[group](seen) // self._block_size, -(-tokens // self._block_size))

    def _take(self, held: Mapping[tuple[int, int], KVCacheBlock]) -> dict[tuple[int, int], int]:
        # attention has passed them, and the blocks belong to other requests
        has_gaps = any(block.is_null for block in held.values())
        slots = None if has_gaps else self._slots.take(len(held))
        if slots is None:
            self._totals.swap_refusals += 1
            return {}
        self._outs += [(block.block_id, slot) for block, slot in zip(held.values(), slots, strict=True)]
        self._totals.swapped_out += len(slots)
        self._totals.swap_out_bytes += len(slots) * self._block_bytes
        return dict(zip(held, slots, strict=True))

    def reach(self, request: Request) -> int:
        """Returns how many first tokens of a waiting request are on the host; its last token is always computed."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or not waiting.places:
            return 0
        return min(waiting.tokens, request.num_tokens - 1)

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        reach = min(self.reach(request), hit.longest)
        return hit if reach <= hit.tokens else hit._replace(blocks=hit.full, tokens=reach)

    def given(self, turn: Turn) -> None:
        if turn.begins:
            self.resumed(turn.request, turn.tables, turn.found, turn.computed)

    def resumed(self, request: Request, tables: Tables, found: int, tokens: int) -> None:
        """Called when a request has blocks again; blocks that no token sees are null.

        found: number of its first tokens that the prefix cache has. tokens: `found` plus the tokens from host memory.
        """
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is None:
            return
        self._leaving += waiting.slots
        self._leaving_states += waiting.states
        self._totals.recomputed_tokens += max(0, waiting.tokens - tokens)
        if tokens > found:
            self._state_ins += [(number, request.request_id) for number in waiting.states]
            numbers = range(found // self._block_size, -(-tokens // self._block_size))
            ins = [
                (waiting.places[group, number], blocks[number].block_id)
                for group, blocks in enumerate(tables)
                for number in numbers
                if not blocks[number].is_null
            ]
            self._ins += ins
            self._totals.swapped_in += len(ins)
            self._totals.swap_in_bytes += len(ins) * self._block_bytes

    def ended(self, request: Request) -> None:
        self.drop(request.request_id)

    def drop(self, request_id: str) -> None:
        """Drops the copies of a request that has finished, or whose KV is no longer needed."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.places:
            dropped = set(waiting.slots)
            self._outs = [pair for pair in self._outs if pair[1] not in dropped]
            self._slots.give(waiting.slots)
            if self._states is not None:
                self._state_outs = [pair for pair in self._state_outs if pair[1] not in waiting.states]
                self._states.give(waiting.states)

    def reset(self) -> None:
        for request_id in list(self._waiting):
            self.drop(request_id)

    def take_orders(self) -> tuple[Pairs, Pairs]:
        """Returns the orders of the scheduled step: (block, slot) to copy out, then (slot, block) to copy back.

        Workers run steps one after the other, so the next step may write slots that this step reads.
        """
        outs, ins = self._outs, self._ins
        self._outs, self._ins = [], []
        self._slots.give(self._leaving)
        self._leaving = []
        return outs, ins

    def take_state_orders(self) -> tuple[list[tuple[str, int]], list[tuple[int, str]]]:
        """Returns which states leave and which come back, see `MemoryOrders`."""
        outs, ins = self._state_outs, self._state_ins
        self._state_outs, self._state_ins = [], []
        if self._states is not None:
            self._states.give(self._leaving_states)
        self._leaving_states = []
        return outs, ins

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        outs, ins = self.take_orders()
        state_outs, state_ins = self.take_state_orders()
        rates = self.cost.rates
        self.cost.step_begins(scheduler_output.total_num_scheduled_tokens, _prompt_tokens(scheduler_output))
        return {
            "rates": rates,
            "swap_outs": outs,
            "swap_ins": ins,
            "state_outs": state_outs,
            "state_ins": state_ins,
        }

    def before_output(self, output: ModelRunnerOutput) -> None:
        self.cost.step_ends()
        speed = link_speed_of(output)
        if speed is not None:
            self.cost.measured(speed)

    def check_integrity(self) -> None:
        """Checks that every slot is free, or held by one request that waits or resumes in this step."""
        waiting = [slot for one in self._waiting.values() for slot in one.slots]
        self._slots.check_integrity([*waiting, *self._leaving])
        if self._states is not None:
            states = [number for one in self._waiting.values() for number in one.states]
            self._states.check_integrity([*states, *self._leaving_states])


def _can_resume(request: Request) -> bool:
    """Returns False for prompt logprobs, for which vLLM computes the whole prompt, and for prompts that may change."""
    return not request.skip_reading_prefix_cache and not request.resumable


def _shared(tables: Tables, held: Mapping[tuple[int, int], KVCacheBlock]) -> tuple[int, int]:
    """Returns how many first blocks other requests hold in every group, and how many of `held` are among them."""
    first = min(_first_own(blocks) for blocks in tables)
    return first, sum(number < first for _, number in held)


def _first_own(blocks: Sequence[KVCacheBlock]) -> int:
    """Returns the number of the first block that no other request holds. Null blocks, before a window, do not count."""
    return next((number for number, block in enumerate(blocks) if block.ref_cnt < 2 and not block.is_null), len(blocks))


def _prompt_tokens(scheduler_output: SchedulerOutput) -> int:
    """Returns the tokens of requests that have several tokens that are not drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    certain = (
        (count, count - len(drafts.get(name, ()))) for name, count in scheduler_output.num_scheduled_tokens.items()
    )
    return sum(count for count, known in certain if known > 1)


def make_swap(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> Swaps:
    """Makes the policy. Raises UcmConfigError if host memory holds no block."""
    options = config.preemption
    manager, groups = scheduler.kv_cache_manager, scheduler.kv_cache_config.kv_cache_groups
    engine_bytes = engine_block_bytes(kv_block_bytes(manager), groups, scheduler.vllm_config)
    slots = HostSlots(options.host_memory // engine_bytes)
    if not slots.count:
        wanted = f"room for a block of the KV cache, {show_bytes(engine_bytes)}, or more"
        raise UcmConfigError([Problem("ucm.preemption.host_memory", show_bytes(options.host_memory), wanted)])
    logger.info("Preemption %s: up to %d blocks of preempted requests in host memory.", options.mode, slots.count)
    # each rank of a stage copies its own heads, at the same time as the others
    ahead = bool(scheduler.scheduler_config.async_scheduling)
    rank_bytes = engine_bytes // scheduler.parallel_config.tensor_parallel_size
    stages = scheduler.parallel_config.pipeline_parallel_size
    cost = SwapCost(scheduler.block_size, rank_bytes, queues=ahead, stages=stages)
    return Swaps(
        slots,
        scheduler.block_size,
        engine_bytes,
        cost,
        always=options.mode == "swap",
        totals=totals,
        skipped=skipped_tokens(manager),
        states=HostSlots(scheduler.max_num_running_reqs) if keeps_states(scheduler.vllm_config) else None,
    )
