"""A scheduler that decides at random: speaks vLLM's dataclasses and remembers what the worker must know."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class Known:
    """The scheduler's side of a request."""

    request_id: str
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


def new_request(request: Known, prefill_token_ids: list[int] | None = None) -> NewRequestData:
    """What the scheduler sends of a request that the worker does not know, or (with tokens) takes back."""
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=list(request.prompt),
        mm_features=[],
        sampling_params=request.params,
        pooling_params=None,
        block_ids=(list(request.blocks),),
        num_computed_tokens=request.computed,
        lora_request=None,
        prefill_token_ids=prefill_token_ids,
    )


def step_output(
    scheduled: dict[str, int],
    new: Iterable[NewRequestData] = (),
    cached: CachedRequestData | None = None,
    finished: Iterable[str] = (),
    preempted: Iterable[str] = (),
) -> SchedulerOutput:
    return replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached or CachedRequestData.make_empty(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


class RandomScheduler:
    """Random steps over a few requests: chunks, decodes, preemption, next inputs of sessions, ends, reused ids.

    It has one of vLLM's two contracts: resumed requests come as cached ones, or as new ones, and then every new request
    carries all its tokens.
    """

    def __init__(self, rng: random.Random, block_size: int, max_model_len: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.resumes_as_new = rng.random() < 0.5
        self.waiting: dict[str, Known] = {}
        self.running: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self._next_block = 1
        self._next_id = 0
        self._ended: list[str] = []

    @property
    def live(self) -> dict[str, Known]:
        """Requests that the worker knows, also sessions whose next input waits."""
        sessions = {name: request for name, request in self.waiting.items() if request.blocks}
        return {**self.running, **self.preempted, **sessions}

    def step(self) -> SchedulerOutput:
        finished = self._finish_some()
        self._submit_some()
        self._extend_some()
        preempted = self._preempt_some()
        scheduled: dict[str, int] = {}
        cached = CachedRequestData.make_empty()
        new: list[NewRequestData] = []
        for request in [r for r in self.running.values() if self.rng.random() < 0.8]:
            self._schedule(request, scheduled)
            grown = self._grow(request, scheduled)
            self._append(cached, request, (grown,) if grown else None)
        for request in [r for r in self.preempted.values() if self.rng.random() < 0.4]:
            self._resume(request, scheduled, cached, new)
        for request in [r for r in self.waiting.values() if self.rng.random() < 0.6]:
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            if not request.blocks:
                request.computed = self.rng.randrange(len(request.prompt))  # a prefix hit
            self._schedule(request, scheduled)
            self._grow(request, scheduled)
            new.append(self._new(request))
        return step_output(scheduled, new, cached, finished, preempted)

    def after(self, request_id: str, num_scheduled: int, token: int | None) -> None:
        """The step was computed, and gave a token or none."""
        request = self.running[request_id]
        request.computed += num_scheduled
        if token is not None:
            request.outputs.append(token)

    def _finish_some(self) -> list[str]:
        ended = [r for group in (self.waiting, self.running, self.preempted) for r in group if self.rng.random() < 0.1]
        ended += [r.request_id for r in self.running.values() if len(r.tokens) >= self.max_model_len]
        for request_id in ended:
            for group in (self.waiting, self.running, self.preempted):
                group.pop(request_id, None)
        self._ended = ended
        return ended

    def _submit_some(self) -> None:
        for _ in range(self.rng.randrange(3)):
            reused = [name for name in self._ended if name not in self.waiting]
            if reused and self.rng.random() < 0.5:
                request_id = self.rng.choice(reused)
            else:
                self._next_id += 1
                request_id = f"request-{self._next_id}"
            prompt = [self.rng.randrange(1, 1000) for _ in range(self.rng.randrange(1, self.max_model_len // 2))]
            self.waiting[request_id] = Known(request_id, prompt)

    def _extend_some(self) -> None:
        """A session's next input: the answer, but for its last token, is a part of the prompt now."""
        # all but the last token is computed where an answer ends; a request that was preempted computes it again first
        ended = [r for r in self.running.values() if r.outputs and r.computed == len(r.tokens) - 1]
        for request in [request for request in ended if self.rng.random() < 0.1]:
            name = request.request_id
            most = self.max_model_len - request.computed - 1
            if most > 0:
                added = [self.rng.randrange(1, 1000) for _ in range(self.rng.randint(1, most))]
                request.prompt, request.outputs = request.tokens[: request.computed] + added, []
                self.waiting[name] = self.running.pop(name)

    def _preempt_some(self) -> list[str]:
        chosen = [name for name in self.running if self.rng.random() < 0.1]
        for name in chosen:
            request = self.preempted[name] = self.running.pop(name)
            request.blocks, request.computed = [], 0
        return chosen

    def _schedule(self, request: Known, scheduled: dict[str, int]) -> None:
        left = len(request.tokens) - request.computed
        scheduled[request.request_id] = left if self.rng.random() < 0.6 else self.rng.randint(1, left)

    def _grow(self, request: Known, scheduled: dict[str, int]) -> list[int]:
        reach = -(-(request.computed + scheduled[request.request_id]) // self.block_size)
        grown = []
        while len(request.blocks) < reach:
            grown.append(self._next_block)
            request.blocks.append(self._next_block)
            self._next_block += 1
        return grown

    def _resume(
        self,
        request: Known,
        scheduled: dict[str, int],
        cached: CachedRequestData,
        new: list[NewRequestData],
    ) -> None:
        self.running[request.request_id] = self.preempted.pop(request.request_id)
        request.computed = self.rng.randrange(len(request.tokens))
        self._schedule(request, scheduled)
        self._grow(request, scheduled)
        if self.resumes_as_new:
            new.append(self._new(request))
        else:
            cached.resumed_req_ids.add(request.request_id)
            cached.all_token_ids[request.request_id] = request.tokens
            self._append(cached, request, (list(request.blocks),))

    def _new(self, request: Known) -> NewRequestData:
        return new_request(request, prefill_token_ids=request.tokens if self.resumes_as_new else None)

    def _append(self, cached: CachedRequestData, request: Known, block_ids: tuple[list[int], ...] | None) -> None:
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(block_ids)
        cached.num_computed_tokens.append(request.computed)
        cached.num_output_tokens.append(len(request.outputs))
