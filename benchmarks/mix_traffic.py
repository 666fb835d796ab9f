"""Traffic of a trace mix, scaled down, as the messages that vLLM's scheduler would send to a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_gaudi_ucm.cli.trace_mix import Lengths, Mix
from vllm_gaudi_ucm.cli.trace_simulation import Prefix, Request, Simulation
from vllm_gaudi_ucm.cli.trace_step import Scheduled
from vllm_gaudi_ucm.graphs.limits import Limits

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.cost import CostModel

# A step then takes a millisecond or two, and has as many blocks per request as before.
TOKENS_SCALE = 16
REQUESTS_SCALE = 4


def scaled(mix: Mix) -> Mix:
    """Fewer tokens per block and per request, and fewer requests; phases and sharing stay what they are."""
    limits = mix.limits
    return replace(
        mix,
        limits=Limits(
            max_num_batched_tokens=limits.max_num_batched_tokens // TOKENS_SCALE,
            max_num_seqs=limits.max_num_seqs // REQUESTS_SCALE,
            max_model_len=limits.max_model_len // TOKENS_SCALE,
            block_size=limits.block_size // TOKENS_SCALE,
            num_blocks=limits.num_blocks // REQUESTS_SCALE,
            contiguous=limits.contiguous,
        ),
        clients=mix.clients // REQUESTS_SCALE,
        # an answer takes that much less time, so clients that waited as long as before would hardly ever meet
        think=mix.think / TOKENS_SCALE,
        period=mix.period / TOKENS_SCALE,
        prefix_length=_shorter(mix.prefix_length),
        prompt=_shorter(mix.prompt),
        output=_shorter(mix.output),
    )


def _shorter(lengths: Lengths) -> Lengths:
    median, sigma, low, high = lengths
    return Lengths(max(1, median // TOKENS_SCALE), sigma, max(1, low // TOKENS_SCALE), max(1, high // TOKENS_SCALE))


class _Scheduling(Simulation):
    """A simulation that keeps what it has scheduled last."""

    batch: list[Scheduled]

    def _schedule(self) -> list[Scheduled]:
        self.batch = super()._schedule()
        return self.batch


@dataclass
class _Live:
    """A request that the worker knows: its id, and its blocks, of which the first `depth` belong to the prefix."""

    request_id: str
    depth: int
    blocks: list[int] = field(default_factory=list)


class MixTraffic:
    """Scheduler messages of a mix's steps, over scattered blocks. A request that was preempted comes back as another.

    Args:
        mix: scaled or not; its limits are the server's.
        cost: sets the pace of the server's clock.
        seed: of everything that is drawn.
        vocabulary: tokens of the prompts are below.
    """

    def __init__(self, mix: Mix, cost: CostModel, seed: int, vocabulary: int) -> None:
        self._simulation = _Scheduling(mix, cost, seed)
        self._rng = random.Random(seed)
        self._block_size = mix.limits.block_size
        self._vocabulary = vocabulary
        self._free = list(range(1, mix.limits.num_blocks))
        self._rng.shuffle(self._free)
        self._prefixes: dict[Prefix, list[int]] = {}
        self._live: dict[Request, _Live] = {}
        self._next_id = 0

    def steps(self, count: int, ask: Callable[[random.Random], SamplingParams]) -> Iterator[SchedulerOutput]:
        """The next `count` steps; `ask` draws the sampling parameters of each new request."""
        for _ in self._simulation.steps(count):
            yield self._message(self._simulation.batch, ask)

    def _message(self, batch: list[Scheduled], ask: Callable[[random.Random], SamplingParams]) -> SchedulerOutput:
        finished = {self._end(request) for request in list(self._live) if request not in self._simulation.running}
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        scheduled: dict[str, int] = {}
        for entry in batch:
            live = self._live.get(entry.request)
            if live is None:
                live = self._begin(entry)
                new.append(self._describe(live, entry, ask(self._rng)))
            else:
                grown = self._grow(live, entry)
                cached.req_ids.append(live.request_id)
                cached.new_block_ids.append((grown,) if grown else None)
                cached.num_computed_tokens.append(entry.computed)
            scheduled[live.request_id] = entry.new
        return replace(
            SchedulerOutput.make_empty(),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=finished,
        )

    def _begin(self, entry: Scheduled) -> _Live:
        self._next_id += 1
        live = self._live[entry.request] = _Live(f"request-{self._next_id}", entry.depth)
        self._grow(live, entry)
        return live

    def _describe(self, live: _Live, entry: Scheduled, params: SamplingParams) -> NewRequestData:
        return NewRequestData(
            req_id=live.request_id,
            prompt_token_ids=self._rng.choices(range(self._vocabulary), k=entry.tokens),
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=(list(live.blocks),),
            num_computed_tokens=entry.computed,
            lora_request=None,
        )

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
        live = self._live.pop(request)
        for block in live.blocks[live.depth :]:
            # anywhere: free blocks are in no order
            self._free.insert(self._rng.randrange(len(self._free) + 1), block)
        return live.request_id
