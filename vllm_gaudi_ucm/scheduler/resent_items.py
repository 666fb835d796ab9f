"""Sends pictures again that a worker needs after a preemption, and that vLLM left out when it sent their request."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.protocol.attachments import attach_items
from vllm_gaudi_ucm.scheduler.parts import SchedulerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class ResentItems(SchedulerPart):
    """vLLM sends a request without the pictures that prefix caching has found. If the request is preempted and its
    blocks are gone, the worker has to encode them after all.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._incomplete: set[str] = set()

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        sent = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for new in scheduler_output.scheduled_new_reqs:
            whole = self._scheduler.requests[new.req_id].mm_features
            # with M-RoPE the sizes of a picture are left, which its positions need
            if any(feature is not kept for feature, kept in zip(new.mm_features, whole, strict=True)):
                self._incomplete.add(new.req_id)
        self._incomplete &= self._scheduler.requests.keys()
        ordered = scheduler_output.scheduled_encoder_inputs
        attach_items(
            scheduler_output,
            {
                request_id: {number: self._scheduler.requests[request_id].mm_features[number] for number in numbers}
                for request_id, numbers in ordered.items()
                if request_id in self._incomplete and request_id not in sent
            },
        )
