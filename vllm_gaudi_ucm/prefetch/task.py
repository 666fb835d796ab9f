"""The prefetch of one request: which of its blocks are there, which failed, which are still to be dispatched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_gaudi_ucm.prefetch.cache import Slot
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority

Deliver = Callable[[int, memoryview], None]
"""Called in a thread of the engine with a block's index in the request and its bytes, valid during the call only."""

WAITING, DONE, LOST = 0, 1, 2


class PrefetchTask:
    """State of a request in the engine; touched under the dispatcher's lock only.

    cursor: blocks [0, cursor) have been dispatched. delivering: calls of `deliver` that run now. settling: the outcome
    that stands once no such call runs any more. pins: cache slots kept until the outcome stands. held: those whose
    memory a caller was given.
    """

    __slots__ = (
        "cursor",
        "deliver",
        "delivering",
        "expires",
        "forgotten",
        "held",
        "keys",
        "outcome",
        "pins",
        "priority",
        "remaining",
        "request_id",
        "sequence",
        "settling",
        "states",
        "submitted",
    )

    def __init__(
        self,
        request_id: str,
        keys: Sequence[bytes],
        priority: PrefetchPriority,
        deliver: Deliver | None,
        submitted: float,
        expires: float,
        sequence: int,
    ) -> None:
        self.request_id = request_id
        self.keys = tuple(keys)
        self.priority = priority
        self.deliver = deliver
        self.submitted = submitted
        self.expires = expires
        self.sequence = sequence
        self.cursor = 0
        self.states = bytearray(len(self.keys))
        self.remaining = len(self.keys)
        self.delivering = 0
        self.settling: PrefetchOutcome | None = None
        self.outcome: PrefetchOutcome | None = None
        self.forgotten = False
        self.pins: list[Slot] = []
        self.held: list[Slot] = []

    @property
    def is_open(self) -> bool:
        """Whether its blocks are still wanted."""
        return self.settling is None

    @property
    def queued(self) -> int:
        """Blocks that no thread has taken yet."""
        return len(self.keys) - self.cursor if self.is_open else 0

    def mark(self, index: int, state: int) -> None:
        """A block that was waiting is there (DONE) or not (LOST); nothing where the request is settled already."""
        if self.is_open and self.states[index] == WAITING:
            self.states[index] = state
            self.remaining -= 1

    def settle(self, outcome: PrefetchOutcome) -> None:
        """Gives up the blocks that are still waiting."""
        self.settling = outcome
        self.remaining = 0
        self.states = self.states.replace(bytes([WAITING]), bytes([LOST]))

    def failed(self) -> frozenset[int]:
        """Indices of the blocks that did not arrive."""
        return frozenset(index for index, state in enumerate(self.states) if state == LOST)
