"""Speculative decoding under a lock: drafts and their verification see one selection. Source: seed 002 (KVStar), 4."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar


@dataclass(frozen=True)
class SpeculativeSession:
    """Drafts of a request that are not verified yet."""

    request_id: str
    num_tokens: int
    start_position: int


Sessions = dict[str, deque[SpeculativeSession]]
"""Open speculations by request, oldest first: under asynchronous scheduling the drafts of a step may begin before those
of the previous one are verified.
"""


class KVStarSpeculative:
    """Opens and closes speculations. A speculation is one step of the lock, however many of its tokens are accepted.

    Args:
        kvstar: the method, which owns the open speculations.
    """

    def __init__(self, kvstar: KVStar) -> None:
        self.kvstar = kvstar
        self._sessions = kvstar.sessions

    def begin_speculation(
        self, request_id: str, num_speculative_tokens: int | None = None, *, num_speculative: int | None = None
    ) -> None:
        """Begins drafts; locks the selection if none is locked. The number may be given by either name of the seed.

        Raises TypeError unless exactly one of the names is given, ValueError for a negative number.
        """
        if (num_speculative_tokens is None) == (num_speculative is None):
            raise TypeError(
                f"begin_speculation of request {request_id!r}: found num_speculative_tokens="
                f"{num_speculative_tokens!r} and num_speculative={num_speculative!r}, expected exactly one of them"
            )
        num_tokens = num_speculative if num_speculative_tokens is None else num_speculative_tokens
        if num_tokens is None or num_tokens < 0:
            raise ValueError(f"begin_speculation of request {request_id!r}: found {num_tokens} tokens, expected >= 0")
        self.kvstar.ensure_locked(request_id)
        position = self.kvstar.current_position(request_id)
        session = SpeculativeSession(request_id, num_tokens, position)
        self._sessions.setdefault(request_id, deque()).append(session)

    def end_speculation(self, request_id: str, accepted_tokens: int) -> None:
        """Ends the oldest open speculation after verification. The lock stays, whether all, some or no drafts were
        accepted.

        Does nothing for a request without an open speculation, which has finished or was preempted. Raises ValueError
        for more accepted tokens than drafts.
        """
        session = self.oldest_session(request_id)
        if session is None:
            return
        if not 0 <= accepted_tokens <= session.num_tokens:
            raise ValueError(
                f"end_speculation of request {request_id!r}: found {accepted_tokens} accepted tokens, "
                f"expected 0 to {session.num_tokens}"
            )
        sessions = self._sessions[request_id]
        sessions.popleft()
        if not sessions:
            del self._sessions[request_id]
        self.kvstar.metrics.record_speculation(session.num_tokens, accepted_tokens)

    def oldest_session(self, request_id: str) -> SpeculativeSession | None:
        """Returns the drafts that are verified next; None if none are open."""
        sessions = self._sessions.get(request_id)
        return sessions[0] if sessions else None

    def verify_consistency(
        self, request_id: str, draft_selection: Iterable[int], target_selection: Iterable[int]
    ) -> bool:
        """Returns whether drafts and verification of a request used the same blocks."""
        return set(draft_selection) == set(target_selection)
