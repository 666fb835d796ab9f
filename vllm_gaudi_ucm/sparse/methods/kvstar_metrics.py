"""Counts what the locks of KVStar did, for its metrics and reports."""

from __future__ import annotations


class KVStarMetrics:
    """Counters since start; the scheduler's role counts locks and drafts, the worker's role checkpoints."""

    def __init__(self) -> None:
        self.lock_count = 0
        self.unlock_count = 0
        self.checkpoint_updates = 0
        self.checkpoint_maintains = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def record_lock(self) -> None:
        self.lock_count += 1

    def record_unlock(self) -> None:
        self.unlock_count += 1

    def record_checkpoint(self, updated: bool, count: int = 1) -> None:
        """Counts selections (one per layer) that were compared with a new one, and replaced or kept."""
        if updated:
            self.checkpoint_updates += count
        else:
            self.checkpoint_maintains += count

    def record_speculation(self, drafted: int, accepted: int) -> None:
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def get_stats(self) -> dict[str, float]:
        """Returns the counters, and the fraction of checkpoints that replaced a selection (0 without any)."""
        checkpoints = self.checkpoint_updates + self.checkpoint_maintains
        return {
            "lock_count": self.lock_count,
            "unlock_count": self.unlock_count,
            "checkpoint_updates": self.checkpoint_updates,
            "checkpoint_maintains": self.checkpoint_maintains,
            "checkpoint_update_rate": self.checkpoint_updates / checkpoints if checkpoints else 0,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
        }
