"""What the caller of `submit_prefetch` holds: the state of one prefetch, also after the engine has forgotten it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome

if TYPE_CHECKING:
    from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
    from vllm_gaudi_ucm.prefetch.task import PrefetchTask


class PrefetchHandle:
    """Speaks of the prefetch that it was returned for, whatever else its request's id stands for later.

    task: the engine's own, to be read under its lock.
    """

    def __init__(self, task: PrefetchTask, dispatcher: Dispatcher) -> None:
        self.task = task
        self._dispatcher = dispatcher

    @property
    def request_id(self) -> str:
        return self.task.request_id

    @property
    def outcome(self) -> PrefetchOutcome | None:
        """None while it is pending. Once there is one, no `deliver` of this prefetch runs or will run."""
        return self._dispatcher.outcome_of(self.task)

    @property
    def failed(self) -> frozenset[int]:
        """Indices of blocks that did not arrive; complete once there is an outcome."""
        return self._dispatcher.failed_of(self.task)

    def wait(self, timeout: float | None = None) -> PrefetchOutcome:
        """The outcome, or TIMEOUT after `timeout` seconds; None waits up to the prefetch's own deadline."""
        return self._dispatcher.wait(self.task, timeout)

    def cancel(self) -> bool:
        """Whether it was pending until now."""
        return self._dispatcher.cancel(self.task)

    def __repr__(self) -> str:
        return f"PrefetchHandle({self.request_id!r}, {self.outcome or 'pending'})"
