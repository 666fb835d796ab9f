"""How a prefetch ended."""

from __future__ import annotations

from enum import StrEnum


class PrefetchOutcome(StrEnum):
    """READY alone means that every block arrived; after anything else the caller runs without the blocks.

    FAILED: some blocks could not be loaded or delivered, or the request was refused. TIMEOUT: its deadline, or the
    caller's, passed first. CANCELLED: by the caller, or by a stop. UNKNOWN: no such request, or forgotten.
    """

    READY = "ready"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
