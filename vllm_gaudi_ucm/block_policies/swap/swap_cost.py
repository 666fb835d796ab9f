"""Decides whether copying the blocks of a preempted request is faster than computing its tokens again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed, MemoryRates

logger = plugin_logger(__name__)

DECAY = 0.9
"""Weight of earlier prompt steps relative to the latest one, so that a rate follows the current load."""


class SwapCost:
    """Estimates times from measured speeds: of copies, which workers measure at start, and of steps with prompts.

    With pipeline stages both are times through all stages, one after the other: each stage computes a step and copies
    its blocks.

    Args:
        block_bytes: bytes of a block in all layers of a KV-cache group on one worker of each stage: workers that share
            a layer copy in parallel.
        queues: whether a step is sent while the previous one is still running, and waits for its end.
        stages: stages of a pipeline. One of them says how large a request's states are.
    """

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        queues: bool = False,
        stages: int = 1,
    ) -> None:
        self._queues = queues
        self._ended = 0.0
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._clock = clock
        self._link: LinkSpeed | None = None
        self._stages = stages
        self._request_bytes = 0
        self._tokens = self._seconds = 0.0
        # steps without output so far, the oldest first: with pipeline stages there are several
        self._steps: deque[tuple[float, int]] = deque()
        self._has_said = False

    def measured(self, link: LinkSpeed) -> None:
        """Takes the copy speeds of the slowest worker, for which all wait."""
        self._link = link
        self._request_bytes = link.request_bytes * self._stages
        to, back = link.to_host * 1e-9, link.from_host * 1e-9
        logger.info("Preemption: blocks go to host memory at %.1f GB/s and come back at %.1f GB/s.", to, back)

    def step_begins(self, tokens: int, prompt_tokens: int) -> None:
        """Called when a step is sent to the workers. tokens: of all requests; prompt_tokens: of prompts among them."""
        # a step with few prompt tokens and many decodes says nothing about prompts
        self._steps.append((self._clock(), tokens if 2 * prompt_tokens > tokens else 0))

    def step_ends(self) -> None:
        """Called when the output of the oldest of these steps arrives: steps end in the order in which they began."""
        begin, tokens = self._steps.popleft() if self._steps else (0.0, 0)
        if self._queues:
            begin, self._ended = max(begin, self._ended), self._clock()
        if not tokens:
            return
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + self._clock() - begin

    @property
    def rates(self) -> MemoryRates:
        """Returns the measured rates; 0 if not measured yet."""
        prefill = self._tokens / self._seconds if self._seconds > 0 else 0.0
        if self._link is None:
            return MemoryRates(prefill)
        return MemoryRates(prefill, self._link.to_host, self._link.from_host)

    def prefers_swap(self, tokens: int, blocks: int, shared: int, shared_copies: int) -> bool:
        """Returns whether copying is faster; also True if a speed is not known yet.

        tokens: number of computed tokens. blocks: number of blocks in all KV-cache groups that would be copied. shared:
        number of first blocks of the context that other requests hold, too: the prefix cache will have them.
        shared_copies: how many of `blocks` are among these.
        """
        rates = self.rates
        if not rates.are_known:
            if not self._has_said:
                logger.info("Preemption auto: nothing was measured yet, so that blocks are swapped.")
                self._has_said = True
            return True
        out = blocks * self._block_bytes + self._request_bytes
        swap = out / rates.to_host + (out - shared_copies * self._block_bytes) / rates.from_host
        return swap < (tokens - min(tokens, shared * self._block_size)) / rates.prefill
