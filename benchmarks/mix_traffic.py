"""Traffic of a trace mix, scaled down, as the messages that vLLM's scheduler would send to a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from benchmarks.mix_simulation import MixSimulation
from vllm_gaudi_ucm_tools.traffic.simulation import Prefix, Request
from vllm_gaudi_ucm_tools.traffic.step import Scheduled

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from benchmarks.mix_sparse import MixSparse
    from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
    from vllm_gaudi_ucm_tools.traffic.simulation import Mix


@dataclass
class TrafficCounts:
    """Counts so far: drafts that were verified and accepted, and requests that lost their blocks."""

    drafts: int = 0
    accepted: int = 0
    preempted: int = 0


@dataclass
class _Live:
    """A request that the worker knows: its id and its tokens, and its blocks, of which the first `depth` belong to the
    prefix."""

    request_id: str
    depth: int
    num_tokens: int
    num_prompt_tokens: int
    blocks: list[int] = field(default_factory=list)


class MixTraffic:
    """Scheduler messages of a mix's steps, over scattered blocks. Preempted requests are resumed with other blocks.

    Args:
        mix: scaled or not; its limits are the server's.
        cost: sets the pace of the server's clock.
        seed: of everything that is drawn.
        vocabulary: tokens of the prompts are below.
        sparse: the scheduler role of a sparse method.
        drafts: most drafts of a request; more than 0 needs `take` after every step.
    """

    def __init__(
        self,
        mix: Mix,
        cost: CostModel,
        seed: int,
        vocabulary: int,
        sparse: MixSparse | None = None,
        drafts: int = 0,
    ) -> None:
        self._simulation = MixSimulation(mix, cost, seed)
        self._rng = random.Random(seed)
        self._block_size = mix.limits.block_size
        self._vocabulary = vocabulary
        self._sparse = sparse
        self._num_drafts = drafts
        self._free = list(range(1, mix.limits.num_blocks))
        self._rng.shuffle(self._free)
        self._prefixes: dict[Prefix, list[int]] = {}
        self._live: dict[Request, _Live] = {}
        self._next_id = 0
        self.counts = TrafficCounts()

    def steps(self, count: int, ask: Callable[[random.Random], SamplingParams]) -> Iterator[SchedulerOutput]:
        """The next `count` steps; `ask` draws the sampling parameters of each new request."""
        for _ in self._simulation.steps(count):
            message = self._message(self._simulation.batch, ask)
            if self._sparse is not None:
                self._sparse.attach(message, {live.request_id: live for live in self._live.values()})
            yield message

    def take(self, output: ModelRunnerOutput, proposed: DraftTokenIds | None) -> None:
        """Takes the worker's result of the last message: how many drafts were accepted, and drafts for the next
        step.
        """
        found = {} if proposed is None else dict(zip(proposed.req_ids, proposed.draft_token_ids, strict=True))
        verified = []
        for entry in self._simulation.batch:
            request, request_id = entry.request, self._live[entry.request].request_id
            tokens = output.sampled_token_ids[output.req_id_to_index[request_id]]
            if not tokens:
                continue
            if drafts := self._simulation.drafts.get(request):
                self._simulation.accepted[request] = len(tokens) - 1
                verified.append((request_id, len(drafts), len(tokens) - 1))
            most = min(self._num_drafts, request.remaining - len(tokens) - 1)
            if drafts := self._drafts(found.get(request_id, []), most):
                self._simulation.proposed[request] = drafts
        self.counts.drafts += sum(drafts for _, drafts, _ in verified)
        self.counts.accepted += sum(accepted for *_, accepted in verified)
        if self._sparse is not None:
            self._sparse.verified(verified)

    def _drafts(self, proposed: list[int], most: int) -> list[int]:
        """Returns at most this many of the proposed drafts, or of any tokens; often one of them is wrong."""
        drafts = proposed or self._rng.choices(range(self._vocabulary), k=self._num_drafts)
        drafts = drafts[: self._rng.randint(0, max(most, 0))]
        if drafts and self._rng.random() < 0.4:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(self._vocabulary)
        return drafts

    def _message(self, batch: list[Scheduled], ask: Callable[[random.Random], SamplingParams]) -> SchedulerOutput:
        preempted = {self._take_blocks(self._live[request]) for request in self._simulation.preempted}
        self.counts.preempted += len(preempted)
        known = {*self._simulation.running, *self._simulation.waiting}
        finished = {self._end(request) for request in list(self._live) if request not in known}
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        scheduled: dict[str, int] = {}
        for entry in batch:
            live = self._live.get(entry.request)
            if live is None:
                live = self._begin(entry)
                new.append(self._describe(live, entry, ask(self._rng)))
            else:
                self._go_on(live, entry, cached)
            scheduled[live.request_id] = entry.new
        drafts = {self._live[request].request_id: tokens for request, tokens in self._simulation.drafts.items()}
        return replace(
            SchedulerOutput.make_empty(),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafts,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            num_spec_tokens_to_schedule=self._num_drafts,
        )

    def _begin(self, entry: Scheduled) -> _Live:
        self._next_id += 1
        live = self._live[entry.request] = _Live(f"request-{self._next_id}", entry.depth, entry.tokens, entry.tokens)
        self._grow(live, entry)
        return live

    def _describe(self, live: _Live, entry: Scheduled, params: SamplingParams) -> NewRequestData:
        prompt = self._rng.choices(range(self._vocabulary), k=entry.tokens)
        params.max_tokens = entry.request.remaining
        if self._sparse is not None:
            self._sparse.begin(live.request_id, prompt, params)
        return NewRequestData(
            req_id=live.request_id,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=(list(live.blocks),),
            num_computed_tokens=entry.computed,
            lora_request=None,
        )

    def _go_on(self, live: _Live, entry: Scheduled, cached: CachedRequestData) -> None:
        """A request that the worker knows; one without blocks was preempted, and gets all that it needs again."""
        if not live.blocks:
            live.depth = entry.depth
            cached.resumed_req_ids.add(live.request_id)
        live.num_tokens = entry.tokens
        grown = self._grow(live, entry)
        cached.req_ids.append(live.request_id)
        cached.new_block_ids.append((grown,) if grown else None)
        cached.num_computed_tokens.append(entry.computed)
        cached.num_output_tokens.append(entry.tokens - live.num_prompt_tokens)

    def _grow(self, live: _Live, entry: Scheduled) -> list[int]:
        """The blocks that the request gets in this step."""
        known = len(live.blocks)
        while len(live.blocks) * self._block_size < entry.computed + entry.new:
            index = len(live.blocks)
            live.blocks.append(self._prefix_block(entry, index) if index < live.depth else self._free.pop())
        return live.blocks[known:]

    def _prefix_block(self, entry: Scheduled, index: int) -> int:
        blocks = self._prefixes.setdefault(entry.request.prefix, [])
        while len(blocks) <= index:
            blocks.append(self._free.pop())
        return blocks[index]

    def _end(self, request: Request) -> str:
        return self._take_blocks(self._live.pop(request))

    def _take_blocks(self, live: _Live) -> str:
        for block in live.blocks[live.depth :]:
            # anywhere: free blocks are in no order
            self._free.insert(self._rng.randrange(len(self._free) + 1), block)
        live.blocks = []
        return live.request_id
