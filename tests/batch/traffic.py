"""Successive steps as a scheduler forms them: mostly decodes, and, as restless as asked for, everything else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput


@dataclass
class Live:
    """`tokens` are known of the request, `computed` of them computed, and `blocks` hold them."""

    computed: int
    tokens: int
    blocks: list[int] = field(default_factory=list)


class Traffic:
    """Requests over a persistent block table whose unused entries hold what earlier requests left there.

    Args:
        rng: decides.
        block_size: tokens per block.
        restlessness: probability of each kind of event per step.
        width: fixed width of the block tables; as wide as needed if 0.
    """

    def __init__(self, rng: random.Random, block_size: int, restlessness: float, width: int = 0) -> None:
        self.live: list[Live] = []
        self._rng = rng
        self._block_size = block_size
        self._restlessness = restlessness
        self._width = width
        self._next_block = 100
        self._left_over = np.random.default_rng(0).integers(1, 100, (16, 256), np.int32)

    def step(self) -> BatchInput:
        """The next batch; what it computes counts as computed afterwards."""
        for event in (self.arrive, self._end, self._preempt, self._exchange_block, self._reorder):
            if self._rng.random() < self._restlessness:
                event()
        scheduled = [request for request in self.live if self._rng.random() >= self._restlessness / 4]
        new = [self._tokens_of(request) for request in scheduled]
        for request, count in zip(scheduled, new, strict=True):
            self._grow(request, request.computed + count)
        batch = BatchInput(
            np.array([request.computed for request in scheduled], np.int32),
            np.array(new, np.int32),
            np.array([request.tokens for request in scheduled], np.int32),
            (self._tables(scheduled),),
        )
        for request, count in zip(scheduled, new, strict=True):
            request.computed += count
            request.tokens += request.computed == request.tokens
        return batch

    def arrive(self) -> None:
        """A request of its own, or one that finds full blocks of others in the cache, crosswise too."""
        if len(self.live) == len(self._left_over):
            return
        size = self._block_size
        full = [request.blocks[: request.computed // size] for request in self.live]
        depth = self._rng.randrange(1 + max(map(len, full), default=0)) if self._rng.random() < 0.5 else 0
        blocks = [self._rng.choice([others[i] for others in full if len(others) > i]) for i in range(depth)]
        rest = self._rng.randint(1, 2 * size)
        computed = depth * size + self._rng.randrange(rest)
        self.live.append(Live(computed, depth * size + rest, blocks))
        self._grow(self.live[-1], computed)

    def _end(self) -> None:
        if self.live:
            self.live.pop(self._rng.randrange(len(self.live)))

    def _preempt(self) -> None:
        if self.live:
            request = self._rng.choice(self.live)
            request.computed, request.blocks = 0, []

    def _exchange_block(self) -> None:
        """No scheduler does this; the planner must see it all the same, and a foreign block of any place."""
        owners = [request for request in self.live if request.blocks]
        if owners:
            request, other = self._rng.choice(owners), self._rng.choice(owners)
            foreign = self._rng.choice(other.blocks)
            if foreign not in request.blocks:
                request.blocks[self._rng.randrange(len(request.blocks))] = foreign

    def _reorder(self) -> None:
        self._rng.shuffle(self.live)

    def _tokens_of(self, request: Live) -> int:
        rest = request.tokens - request.computed
        return rest if self._rng.random() < 0.7 else self._rng.randint(1, rest)

    def _grow(self, request: Live, tokens: int) -> None:
        while len(request.blocks) * self._block_size < tokens:
            self._next_block += 1
            request.blocks.append(self._next_block)

    def _tables(self, scheduled: list[Live]) -> np.ndarray:
        width = self._width or max((len(request.blocks) for request in scheduled), default=0)
        for row, request in zip(self._left_over, scheduled, strict=False):
            row[: len(request.blocks)] = request.blocks
        return self._left_over[: len(scheduled), :width].copy()
