"""A scheduler that decides at random, of drafts, too."""

from __future__ import annotations

import random
from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput

from tests.batch.scheduling import Known, RandomScheduler


class DraftScheduler(RandomScheduler):
    """Schedules some of the drafts in `proposals` with the decode of their request, and pads some with -1."""

    def __init__(self, rng: random.Random, block_size: int, max_model_len: int) -> None:
        super().__init__(rng, block_size, max_model_len)
        self.proposals: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}

    def step(self) -> SchedulerOutput:
        self.drafts = {}
        output = super().step()
        self.proposals = {}
        scheduled = dict(output.num_scheduled_tokens)
        padded = dict(self.drafts)
        for name, drafts in self.drafts.items():
            if self.rng.random() < 0.3:
                # rows for which there are blocks nowhere: nobody may write to them
                padded[name] = [*drafts, -1, -1]
                scheduled[name] += 2
        return replace(
            output,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=padded,
        )

    def accept(self, request_id: str, tokens: list[int]) -> None:
        """The step gave these tokens: drafts that were accepted, and one more."""
        request = self.running[request_id]
        request.computed = len(request.tokens) + len(tokens) - 1
        request.outputs += tokens

    def _schedule(self, request: Known, scheduled: dict[str, int]) -> None:
        super()._schedule(request, scheduled)
        if len(request.tokens) - request.computed > 1:
            return
        room = self.max_model_len - len(request.tokens) - 1
        drafts = self.proposals.get(request.request_id, [])[: max(0, self.rng.randint(0, room) if room > 0 else 0)]
        self.drafts[request.request_id] = drafts
        scheduled[request.request_id] += len(drafts)
