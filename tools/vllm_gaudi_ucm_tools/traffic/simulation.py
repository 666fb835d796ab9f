"""A small continuous-batching server on a modelled clock: arrivals, chunked prefill, prefix caching, preemption.

It schedules as vLLM does (running requests first, then waiting ones, within the token budget) and counts blocks
instead of holding them. It yields the steps of a phase log.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm_tools.traffic.step import Scheduled, measure_step


class Lengths(NamedTuple):
    """Log-normal token counts, clipped to [low, high]."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


@dataclass(frozen=True)
class Mix:
    """Clients in a closed loop: each waits, sends a request, reads the answer, and waits again.

    clients: how many at the busiest time; the number swells and ebbs with `period` seconds of the server's clock.
    think: mean seconds between an answer and the next request; 0: every client comes back at once.
    quiet: fraction of the clients that is left at the quietest time.
    prefixes: how many different prefixes (system prompts, tools, documents) there are, and their lengths;
        `prefix_share` of the sessions start with one of them.
    prompt, output: new tokens of a turn, and tokens of an answer.
    turns: mean turns of a session; a turn's prompt holds the whole session so far, most of it cached.
    """

    description: str
    limits: Limits
    clients: int
    think: float
    period: float
    quiet: float
    prefixes: int
    prefix_length: Lengths
    prefix_share: float
    prompt: Lengths
    output: Lengths
    turns: float


def _limits(tokens: int, requests: int, length: int, blocks: int) -> Limits:
    return Limits(tokens, requests, length, block_size=128, num_blocks=blocks, contiguous=False)


MIXES = {
    "chat": Mix(
        description="conversations of a few turns over four system prompts, load swelling and ebbing",
        limits=_limits(2048, 64, 8192, 3400),
        clients=260,
        think=4.0,
        period=60.0,
        quiet=0.1,
        prefixes=4,
        prefix_length=Lengths(600, 0.6, 100, 2000),
        prefix_share=0.75,
        prompt=Lengths(120, 1.0, 8, 2500),
        output=Lengths(180, 0.8, 4, 1200),
        turns=3.0,
    ),
    "long-context": Mix(
        description="questions about documents of 2K to 30K tokens, a few of them asked about again and again",
        limits=_limits(4096, 32, 32768, 3400),
        clients=48,
        think=6.0,
        period=120.0,
        quiet=0.15,
        prefixes=6,
        prefix_length=Lengths(12000, 0.6, 2000, 28000),
        prefix_share=0.4,
        prompt=Lengths(3000, 1.3, 50, 28000),
        output=Lengths(250, 0.7, 16, 1500),
        turns=1.5,
    ),
    "batch": Mix(
        description="offline jobs that keep the server full, two few-shot prompts, and the ends of the jobs",
        limits=_limits(8192, 256, 4096, 1500),
        clients=300,
        think=0.0,
        period=90.0,
        quiet=0.3,
        prefixes=2,
        prefix_length=Lengths(900, 0.3, 400, 1600),
        prefix_share=0.5,
        prompt=Lengths(350, 0.8, 16, 2000),
        output=Lengths(220, 0.7, 8, 900),
        turns=1.0,
    ),
    "agentic": Mix(
        description="agents with a long shared tool prompt and many short turns whose context grows",
        limits=_limits(4096, 48, 16384, 3400),
        clients=130,
        think=1.5,
        period=60.0,
        quiet=0.15,
        prefixes=3,
        prefix_length=Lengths(4500, 0.3, 2500, 7000),
        prefix_share=1.0,
        prompt=Lengths(350, 1.1, 16, 3000),
        output=Lengths(80, 0.8, 8, 600),
        turns=9.0,
    ),
}


# Planning and staging on the host, for the log's column: a steady figure of our planner at 64 requests.
PLAN_MS = 0.2
# A session's blocks are evicted between two of its turns this often.
EVICTED = 0.1


@dataclass(eq=False)
class Prefix:
    """A prefix that sessions share: its length in blocks, and how many of them are computed."""

    blocks: int
    ready: int = 0
    owner: Request | None = None


@dataclass(eq=False)
class Request:
    """One turn of a session.

    tokens: prompt and outputs so far; computed: tokens whose K/V are in the cache; remaining: outputs to come.
    depth: leading blocks that belong to the prefix; held: blocks of its own.
    cached: leading blocks that the previous turn may have left in the cache.
    """

    client: int
    prefix: Prefix | None
    tokens: int
    remaining: int
    turns_left: int
    cached: int
    computed: int = 0
    depth: int = 0
    held: int = 0


@dataclass
class Simulation:
    """The server's state between two steps."""

    mix: Mix
    cost: CostModel
    seed: int
    clock: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        limits = self.mix.limits
        self._prefixes = [
            Prefix(self.mix.prefix_length.draw(self._rng) // limits.block_size) for _ in range(self.mix.prefixes)
        ]
        # Prefixes stay in the cache; the rest is for the requests' own blocks, block 0 being the dummy block.
        self._free = limits.num_blocks - 1 - sum(prefix.blocks for prefix in self._prefixes)
        if self._free < 2:
            raise ValueError(
                f"num_blocks is {limits.num_blocks}, which leaves {self._free} blocks besides the prefixes of the mix; "
                "expected at least 2"
            )
        self._longest = min(limits.max_model_len, self._free * limits.block_size)
        self._arrivals: list[tuple[float, int, Request | None]] = []
        self._ties = itertools.count()
        self._clients: list[int] = list(range(self.mix.clients))
        for client in self._clients:
            self._arrive_later(client, None)

    def steps(self, count: int) -> Iterator[StepRecord]:
        """The next `count` steps; their milliseconds are modelled."""
        for step in range(count):
            self._admit_arrivals()
            batch = self._schedule()
            counts = measure_step(batch, self.mix.limits.block_size)
            forward = self.cost.forward(counts.bucket)
            sample = float(self.cost.logits_seconds(counts.bucket.logits))
            self.clock += forward + sample + PLAN_MS / 1e3
            yield counts.record(step, PLAN_MS, 1e3 * forward, 1e3 * sample)
            self._finish(batch)

    def _admit_arrivals(self) -> None:
        """Requests whose time has come join the queue; an idle server waits for the first."""
        while True:
            if self._arrivals and not self.running and not self.waiting:
                self.clock = max(self.clock, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.clock:
                _, client, session = heapq.heappop(self._arrivals)
                if client < self._active_clients():
                    self.waiting.append(session or self._new_session(client))
                else:
                    self._arrive_later(client, session)
            if self.running or self.waiting:
                return

    def _active_clients(self) -> float:
        swell = 0.5 + 0.5 * math.sin(2 * math.pi * self.clock / self.mix.period)
        return max(1.0, self.mix.clients * (self.mix.quiet + (1.0 - self.mix.quiet) * swell))

    def _arrive_later(self, client: int, session: Request | None) -> None:
        # A client that pauses looks again after a while: load also ebbs in a closed loop without think time.
        pause = self.mix.think if self.mix.think and client < self._active_clients() else self.mix.period / 10
        at_once = not self.mix.think and client < self._active_clients()
        delay = 0.0 if at_once else self._rng.expovariate(1.0 / pause)
        heapq.heappush(self._arrivals, (self.clock + delay, client, session))

    def _new_session(self, client: int) -> Request:
        rng, mix = self._rng, self.mix
        prefix = rng.choice(self._prefixes) if rng.random() < mix.prefix_share else None
        head = prefix.blocks * mix.limits.block_size if prefix else 0
        turns = 1 if mix.turns <= 1 else 1 + int(rng.expovariate(1.0 / (mix.turns - 1.0)) + 0.5)
        return self._turn(client, prefix, head, turns - 1, 0)

    def _turn(self, client: int, prefix: Prefix | None, history: int, turns_left: int, cached: int) -> Request:
        """A turn after `history` tokens, cut so that the longest request still fits."""
        output = min(self.mix.output.draw(self._rng), self._longest // 2)
        prompt = min(history + self.mix.prompt.draw(self._rng), self._longest - output)
        if prefix is not None and prompt < prefix.blocks * self.mix.limits.block_size + 1:
            prefix = None
        return Request(client, prefix, max(prompt, 1), output, turns_left, cached)

    def _schedule(self) -> list[Scheduled]:
        budget = self.mix.limits.max_num_batched_tokens
        batch: list[Scheduled] = []
        preempted = False
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            new = min(request.tokens - request.computed, budget)
            while not self._allocate(request, new):
                self._preempt(self.running[-1])
                preempted = True
                if request not in self.running:
                    break
            else:
                batch.append(self._scheduled(request, new))
                budget -= new
        # vLLM preempts from the end, so a preempted request was never scheduled in this step.
        while self.waiting and budget and not preempted and len(self.running) < self.mix.limits.max_num_seqs:
            request = self.waiting[0]
            self._hit(request)
            new = min(request.tokens - request.computed, budget)
            if not self._allocate(request, new):
                request.computed = request.depth = 0
                break
            self.running.append(self.waiting.popleft())
            batch.append(self._scheduled(request, new))
            budget -= new
        return batch

    @staticmethod
    def _scheduled(request: Request, new: int) -> Scheduled:
        return Scheduled(request, id(request.prefix), request.depth, request.computed, new, request.tokens)

    def _hit(self, request: Request) -> None:
        """Leading blocks that are cached: of the prefix, and of the session's turn before."""
        size = self.mix.limits.block_size
        most = (request.tokens - 1) // size
        prefix = request.prefix
        request.depth = 0
        if prefix is not None and prefix.owner is None:
            prefix.owner = request
        if prefix is not None:
            request.depth = prefix.blocks if prefix.owner is request else min(prefix.ready, most)
        hit = min(prefix.ready, request.depth) if prefix is not None else 0
        if prefix is None or prefix.ready == prefix.blocks:
            hit = max(hit, request.cached)
        request.computed = min(hit, most) * size

    def _allocate(self, request: Request, new: int) -> bool:
        own = max(0, -(-(request.computed + new) // self.mix.limits.block_size) - request.depth)
        missing = own - request.held
        if missing > self._free:
            return False
        self._free -= max(0, missing)
        request.held = max(own, request.held)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.cached = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._free += request.held
        request.held = request.computed = request.depth = 0

    def _finish(self, batch: list[Scheduled]) -> None:
        """Writes back the results of a step; finished requests free their blocks, and their clients think."""
        size = self.mix.limits.block_size
        for entry in batch:
            request = entry.request
            request.computed += entry.new
            if request.prefix is not None and request.prefix.owner is request:
                request.prefix.ready = max(request.prefix.ready, min(request.prefix.blocks, request.computed // size))
            if request.computed < request.tokens:
                continue
            request.tokens += 1
            request.remaining -= 1
            if request.remaining <= 0:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        size = self.mix.limits.block_size
        cached = 0 if self._rng.random() < EVICTED else request.computed // size
        history = request.tokens
        self._release(request)
        follow = None
        if request.turns_left and history < self._longest - 2 * self.mix.output.low:
            follow = self._turn(request.client, request.prefix, history, request.turns_left - 1, cached)
        self._arrive_later(request.client, follow)
