"""Requests, served step by step: what a vLLM engine schedules, on a clock of modelled seconds.

Assumptions: chunked prefill, running requests before waiting ones, first come first served, preemption of the last
one by recomputation, steps that take their modelled time without padding. Drafts are accepted at one rate.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_gaudi_ucm_tools.vllm_gaudi.block_pool import BlockPool
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.shape_cost import ShapeCost
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Request, Step, TrafficError

REPORT_EVERY = 200


@dataclass(eq=False, slots=True)
class _Live:
    """A request in the engine. tokens: prompt and outputs so far. computed: tokens in the cache. named: leading blocks
    that are known by their prefix. highest: the highest place of a block.
    """

    request: Request
    tokens: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    named: int = 0
    highest: int = 0

    @property
    def decodes(self) -> bool:
        return self.computed >= self.request.prompt and self.tokens - self.computed == 1


class Engine:
    """One rank.

    Args:
        settings: of the server.
        acceptance: share of drafts that are accepted.
        seed: of the drafts' acceptance.
    """

    def __init__(self, settings: Settings, acceptance: float, seed: int) -> None:
        self._settings = settings
        self._acceptance = acceptance
        self._rng = random.Random(seed)
        self._pool = BlockPool(settings.num_blocks)
        self._running: list[_Live] = []
        self._waiting: deque[_Live] = deque()
        self._scheduled: list[tuple[_Live, int, bool]] = []
        """Requests of the step, their new tokens, and whether they decode."""
        self.num_finished = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_free(self) -> int:
        """Returns how many blocks no request has."""
        return self._pool.num_free

    def add(self, request: Request) -> None:
        self._waiting.append(_Live(request, request.prompt))

    def schedule(self) -> Step:
        """Returns the next step, which `finish` ends."""
        budget = self._settings.max_num_batched_tokens
        self._scheduled, preempted = [], set[_Live]()
        for live in list(self._running):
            if not budget:
                break
            if live in preempted:
                continue
            decodes = live.decodes
            new = min(self._settings.decode_tokens if decodes else live.tokens - live.computed, budget)
            while live not in preempted and not self._allocate(live, new):
                last = self._running[-1]
                preempted.add(last)
                self._preempt(last)
            if live not in preempted:
                self._scheduled.append((live, new, decodes))
                budget -= new
        while self._waiting and budget and not preempted and len(self._running) < self._settings.max_num_seqs:
            live = self._waiting[0]
            self._hit(live)
            new = min(live.tokens - live.computed, budget)
            if not self._allocate(live, new):
                self._release(live)
                break
            self._running.append(self._waiting.popleft())
            self._scheduled.append((live, new, live.decodes))
            budget -= new
        return self._step()

    def _step(self) -> Step:
        if self._settings.contiguous and self._pool.compact():
            for live in self._running:
                live.highest = self._pool.highest(live.blocks)
        size = self._settings.block_size
        decodes = [live for live, _, is_decode in self._scheduled if is_decode]
        prefills = tuple(Prefill(new, live.computed) for live, new, is_decode in self._scheduled if not is_decode)
        blocks = sum(live.computed // size + 1 for live in decodes)
        highest = max((live.highest for live in decodes), default=-1) + 1
        return Step(prefills, len(decodes), blocks, highest, self._settings.decode_tokens)

    def finish(self) -> None:
        """Ends the step: blocks become known, requests get their tokens, and finished ones leave."""
        for live, new, drafted in self._scheduled:
            live.computed = min(live.computed + new, live.tokens) if drafted else live.computed + new
            if live.request.unit:
                self._name_blocks(live)
            if live.computed < live.tokens:
                continue
            accepted = 1
            while drafted and accepted < self._settings.decode_tokens and self._rng.random() < self._acceptance:
                accepted += 1
            live.tokens += accepted
            live.computed += accepted - 1
            if live.tokens >= live.request.prompt + live.request.output:
                self._running.remove(live)
                self._release(live)
                self.num_finished += 1

    def _keys(self, live: _Live, first: int = 0) -> list[tuple[int, int]]:
        """Returns the names of full blocks of the prompt, from block `first` on."""
        request, size = live.request, self._settings.block_size
        if not self._settings.prefix_caching or not request.unit:
            return []
        most = min(request.prompt // size, len(request.hashes) * request.unit // size)
        return [(request.hashes[((block + 1) * size - 1) // request.unit], block) for block in range(first, most)]

    def _hit(self, live: _Live) -> None:
        most = (live.tokens - 1) // self._settings.block_size
        found = self._pool.known(self._keys(live)[:most])
        # room for the rest is checked after this, and what does not fit is given back
        self._pool.share(found)
        live.blocks = list(found)
        live.computed = len(found) * self._settings.block_size
        live.named = len(found)

    def _name_blocks(self, live: _Live) -> None:
        full = live.computed // self._settings.block_size
        if full <= live.named:
            return
        for key in self._keys(live, live.named)[: full - live.named]:
            self._pool.name(live.blocks[key[1]], key)
        live.named = full

    def _allocate(self, live: _Live, new: int) -> bool:
        missing = -(-(live.computed + new) // self._settings.block_size) - len(live.blocks)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
            return False
        taken = self._pool.take(missing)
        live.blocks += taken
        live.highest = max(live.highest, self._pool.highest(taken))
        return True

    def _preempt(self, live: _Live) -> None:
        self._running.remove(live)
        self._scheduled = [entry for entry in self._scheduled if entry[0] is not live]
        self._release(live)
        self._waiting.appendleft(live)

    def _release(self, live: _Live) -> None:
        self._pool.give_back(live.blocks)
        live.blocks, live.computed, live.named, live.highest = [], 0, 0, 0


def check_requests(requests: Sequence[Request], settings: Settings, source: str) -> None:
    """Raises TrafficError if a request cannot be served under the limits."""
    room = (settings.num_blocks - 1) * settings.block_size
    for number, request in enumerate(requests, 1):
        total = request.prompt + request.output
        if request.prompt < 1 or request.output < 1 or request.arrival < 0:
            raise TrafficError(
                f"{source}: request {number} has {request.prompt} prompt and {request.output} output tokens and "
                f"arrives at {request.arrival:g} s; expected at least 1 token of each, and no negative time"
            )
        if total > settings.max_model_len:
            raise TrafficError(
                f"{source}: request {number} has {request.prompt} prompt and {request.output} output tokens, more than "
                f"max_model_len {settings.max_model_len}; raise --max-model-len, or drop such requests with "
                "--drop-longer"
            )
        if total + settings.drafts > room:
            raise TrafficError(
                f"{source}: request {number} has {total} tokens, and the cache holds {room}; raise --num-blocks, or "
                "drop such requests with --drop-longer"
            )


def simulate(
    requests: Sequence[Request],
    settings: Settings,
    cost: ShapeCost,
    acceptance: float = 0.6,
    report: Callable[[float], None] = lambda done: None,
) -> list[tuple[Step, ...]]:
    """Returns the steps of all ranks, which requests go to in turn. The requests must fit, see `check_requests`."""
    engines = [Engine(settings, acceptance, rank) for rank in range(settings.ranks)]
    arrivals = deque(sorted(requests, key=lambda request: request.arrival))
    clock, added = 0.0, 0
    steps: list[tuple[Step, ...]] = []
    # a long log has the same steps again and again: each is one object, whose length is modelled once
    known: dict[tuple[Step, ...], tuple[tuple[Step, ...], float]] = {}
    while arrivals or any(engine.busy for engine in engines):
        if arrivals and not any(engine.busy for engine in engines):
            clock = max(clock, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= clock:
            engines[added % len(engines)].add(arrivals.popleft())
            added += 1
        step = tuple(engine.schedule() for engine in engines)
        same = known.get(step)
        if same is None:
            same = known[step] = step, max(_seconds(own, settings, cost) for own in step)
        clock += same[1]
        for engine in engines:
            engine.finish()
        steps.append(same[0])
        if len(steps) % REPORT_EVERY == 0:
            report(sum(engine.num_finished for engine in engines) / len(requests))
    report(1.0)
    return steps


def _seconds(step: Step, settings: Settings, cost: ShapeCost) -> float:
    """Returns the modelled seconds of a step without padding."""
    seconds = 0.0
    for prefill in step.prefills:
        context = -(-prefill.computed // settings.block_size)
        seconds += float(cost.prefill(1, prefill.query, prefill.query, context))
    if step.decodes:
        seconds += float(cost.decode(step.decodes * step.tokens, step.blocks * step.tokens))
    return seconds
