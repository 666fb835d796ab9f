"""A mix's simulated server whose decodes may have drafts to verify."""

from __future__ import annotations

from vllm_gaudi_ucm_tools.traffic.simulation import Request, Simulation
from vllm_gaudi_ucm_tools.traffic.step import Scheduled


class MixSimulation(Simulation):
    """A simulation that keeps its last schedule.

    batch: entries of the last step; verifications count their drafts in `new`, not in `tokens`.
    proposed: drafts for the next step, set from outside; they are gone after it, scheduled or not.
    drafts: drafts that the last step verifies, cut by the token budget. accepted: how many were accepted, set from
        outside.
    preempted: requests that lost their blocks in the last step.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch: list[Scheduled] = []
        self.proposed: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[int]] = {}
        self.accepted: dict[Request, int] = {}
        self.preempted: set[Request] = set()

    def _schedule(self) -> list[Scheduled]:
        """Schedules like vLLM: drafts are tokens of their request, and count for its budget and its blocks."""
        proposed = {request: drafts for request, drafts in self.proposed.items() if request in self.running}
        self.proposed, self.accepted, self.preempted = {}, {}, set()
        for request, drafts in proposed.items():
            request.tokens += len(drafts)
        batch = super()._schedule()
        for request, drafts in proposed.items():
            request.tokens -= len(drafts)
        self.batch = [entry._replace(tokens=entry.request.tokens) for entry in batch]
        self.drafts = {
            entry.request: proposed[entry.request][: entry.new - 1]
            for entry in batch
            if entry.request in proposed and entry.new > 1
        }
        return self.batch

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        self.preempted.add(request)

    def _finish(self, batch: list[Scheduled]) -> None:
        """Ends a step: accepted drafts count as output; rejected ones count as not computed."""
        certain = []
        for entry in batch:
            accepted = self.accepted.get(entry.request, 0)
            entry.request.tokens += accepted
            entry.request.remaining -= accepted
            rejected = len(self.drafts.get(entry.request, ())) - accepted
            certain.append(entry._replace(new=entry.new - rejected))
        super()._finish(certain)
