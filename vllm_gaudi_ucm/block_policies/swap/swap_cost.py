"""Whether a preempted request is back sooner by a copy of its blocks, or by computing its tokens again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.memory_orders import MemoryRates

if TYPE_CHECKING:
    from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed

logger = plugin_logger(__name__)

DECAY = 0.9
"""Weight of the prompt steps so far against the latest one: a rate follows what the server does now."""


class SwapCost:
    """Seconds by measured speeds: of the copies, which workers measure at their start, and of the steps with prompts.

    With pipeline stages both are times through all stages, one after the other: a step computes, and its blocks are
    copied, on each of them.

    Args:
        block_size: tokens of a block.
        block_bytes: of all layers of a KV-cache group, as one worker of each stage has them: those that share a layer
            copy side by side.
        clock: seconds.
        queues: whether a step is sent while the one before it still runs, and waits for that one's end.
    """

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        queues: bool = False,
    ) -> None:
        self._queues = queues
        self._ended = 0.0
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._clock = clock
        self._link: LinkSpeed | None = None
        self._tokens = self._seconds = 0.0
        # steps whose output is not here yet, the oldest first: with pipeline stages there are several
        self._steps: deque[tuple[float, int]] = deque()
        self._has_said = False

    def measured(self, link: LinkSpeed) -> None:
        """The workers' copies: those of the slowest, for which all wait."""
        self._link = link
        to, back = link.to_host * 1e-9, link.from_host * 1e-9
        logger.info("Preemption: blocks go to host memory at %.1f GB/s and come back at %.1f GB/s.", to, back)

    def step_begins(self, tokens: int, prompt_tokens: int) -> None:
        """A step is sent to the workers. tokens: of all requests; prompt_tokens: of prompts among them."""
        # one with a few tokens of a prompt beside many decodes says nothing of prompts
        self._steps.append((self._clock(), tokens if 2 * prompt_tokens > tokens else 0))

    def step_ends(self) -> None:
        """The output of the oldest of these steps is here: steps end in the order in which they began."""
        begin, tokens = self._steps.popleft() if self._steps else (0.0, 0)
        if self._queues:
            begin, self._ended = max(begin, self._ended), self._clock()
        if not tokens:
            return
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + self._clock() - begin

    @property
    def rates(self) -> MemoryRates:
        """What was measured; 0: not yet."""
        prefill = self._tokens / self._seconds if self._seconds > 0 else 0.0
        if self._link is None:
            return MemoryRates(prefill)
        return MemoryRates(prefill, self._link.to_host, self._link.from_host)

    def prefers_swap(self, tokens: int, blocks: int, shared: int, shared_copies: int) -> bool:
        """Whether copying is faster; also where a speed is not known yet.

        tokens: that were computed. blocks: of all KV-cache groups that would be copied. shared: the first blocks of the
        context that other requests hold, too: the prefix cache will have them. shared_copies: of `blocks`, in these.
        """
        rates = self.rates
        if not rates.are_known:
            if not self._has_said:
                logger.info("Preemption auto: nothing was measured yet, so that blocks are swapped.")
                self._has_said = True
            return True
        swap = self._block_bytes * (blocks / rates.to_host + (blocks - shared_copies) / rates.from_host)
        return swap < (tokens - min(tokens, shared * self._block_size)) / rates.prefill
