"""Priorities of prefetches, by the position of their request in the queue. Source: seed 000 (GSA), 3.3."""

from __future__ import annotations

from enum import IntEnum

HIGH_POSITIONS = 4
NORMAL_POSITIONS = 16


class PrefetchPriority(IntEnum):
    """The smaller, the sooner: URGENT is about to run, HIGH in the next batch, LOW speculative."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @classmethod
    def compute_priority(cls, queue_position: int) -> PrefetchPriority:
        """Priority at a position of the queue; 0 is the request that runs, or runs next."""
        if queue_position <= 0:
            return cls.URGENT
        if queue_position <= HIGH_POSITIONS:
            return cls.HIGH
        if queue_position <= NORMAL_POSITIONS:
            return cls.NORMAL
        return cls.LOW
