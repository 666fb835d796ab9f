"""Compares a slot for each token with blocks of 128: memory that requests hold without using it, requests that fit at
once, and the time of vLLM's block manager for allocation and freeing; with `--step` the time of a decode step, too.

`python -m benchmarks.token_granularity [--json FILE] [--step [--graphs MODE]]`. All of it is vLLM's own
`KVCacheManager`, with blocks of 1 and of 128 tokens in turn; engines of `--step` share one process and take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.table import Table
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Mix

BLOCK = 128
SIZES = {"token": 1, f"blocks of {BLOCK}": BLOCK}
MEAN = 440
VOCABULARY = 32000


class Pool:
    """vLLM's block manager, and requests of it.

    Args:
        size: tokens of a block.
        tokens: of the whole cache.
        caching: whether prefixes are shared.
    """

    def __init__(self, size: int, tokens: int, caching: bool) -> None:
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(tokens // size + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.size = size
        self.manager = KVCacheManager(config, 1 << 20, size, size, enable_caching=caching)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(size, hash_function) if caching else None
        self._number = 0

    def request(self, tokens: list[int]) -> Request:
        self._number += 1
        params = SamplingParams(max_tokens=1 << 19)
        return Request(f"r{self._number}", tokens, params, None, block_hasher=self._hasher)

    def begin(self, request: Request) -> bool:
        """Slots for the whole prompt; False if there is no room."""
        found, cached, _ = self.manager.get_computed_blocks(request)
        done = self.manager.allocate_slots(request, request.num_tokens - cached, cached, found) is not None
        if done:
            request.num_computed_tokens = request.num_tokens
        return done

    def grow(self, request: Request) -> None:
        """A slot for the token behind the last."""
        if self.manager.allocate_slots(request, 1) is None:
            raise RuntimeError("the cache is too small for the load")
        request.num_computed_tokens += 1

    def held(self) -> int:
        """Tokens that the blocks of requests would hold."""
        pool = self.manager.block_pool
        return (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * self.size


def lengths(count: int, seed: int) -> list[int]:
    """Draws contexts around MEAN, as long-tailed as conversations."""
    rng = random.Random(seed)
    drawn = [rng.lognormvariate(0, 0.8) for _ in range(count)]
    return [max(1, round(length * MEAN * count / sum(drawn))) for length in drawn]


def waste(requests: int) -> dict[str, float]:
    """Returns by size the share of slots that requests hold without a token."""
    found = {}
    for name, size in SIZES.items():
        pool = Pool(size, 4 * MEAN * requests, caching=False)
        contexts = lengths(requests, 0)
        for length in contexts:
            pool.begin(pool.request([1] * length))
        found[name] = 1 - sum(contexts) / pool.held()
    return found


def chat_contexts(mix: Mix, seed: int) -> Iterator[list[int]]:
    """Tokens of one conversation after the other, in the middle of an answer."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    prefixes = [tokens(mix.prefix_length.draw(rng)) for _ in range(mix.prefixes)]
    while True:
        prefix = rng.choice(prefixes) if rng.random() < mix.prefix_share else []
        yield prefix + tokens(mix.prompt.draw(rng) + rng.randrange(1, mix.output.draw(rng) + 1))


def fits(share: float, seeds: int, mix: str = "chat") -> dict[str, float]:
    """Returns by size the requests that fit at once, on average. share: of the mix's KV cache."""
    found = MIXES[mix]
    room = int(found.limits.num_blocks * found.limits.block_size * share)
    counts: dict[str, list[int]] = {name: [] for name in SIZES}
    for seed in range(seeds):
        for name, size in SIZES.items():
            pool, count = Pool(size, room, caching=True), 0
            for context in chat_contexts(found, seed):
                if not pool.begin(pool.request(context)):
                    break
                count += 1
            counts[name].append(count)
    return {name: mean(values) for name, values in counts.items()}


@dataclass
class Churn:
    """Decodes that end and are followed by others, over one pool.

    allocation, hashing: seconds. ends: of each request the step in which it ends.
    """

    pool: Pool
    rng: random.Random
    requests: list[Request] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    allocation: float = 0.0
    hashing: float = 0.0
    steps: int = 0

    def step(self, count: int) -> None:
        """Gives each of `count` requests a slot; finished ones are freed and replaced by new ones."""
        prompts = self._arrivals(count)
        begun = self._timed(lambda: [(place, self.pool.request(prompt)) for place, prompt in prompts], "hashing")
        self._timed(lambda: self._allocate(begun), "allocation")
        self._timed(self._sample, "hashing")
        self.steps += 1

    def _timed(self, work: Callable[[], Any], what: str) -> Any:
        begin = time.perf_counter()
        result = work()
        setattr(self, what, getattr(self, what) + time.perf_counter() - begin)
        return result

    def _arrivals(self, count: int) -> list[tuple[int, list[int]]]:
        """Returns prompts of new requests, by the places of finished ones; the first ones start in the middle of their
        answers.
        """
        rng, begun = self.rng, []
        first = [self.steps] * (count - len(self.ends))
        self.ends += first
        for place in [index for index, end in enumerate(self.ends) if end <= self.steps]:
            begun.append((place, [rng.randrange(VOCABULARY) for _ in range(rng.randrange(40, 2 * MEAN - 240))]))
            self.ends[place] = self.steps + (rng.randrange(1, 200) if first else 200)
        return begun

    def _allocate(self, begun: list[tuple[int, Request]]) -> None:
        for place, request in begun:
            if place < len(self.requests):
                self.pool.manager.free(self.requests[place])
                self.requests[place] = request
            else:
                self.requests.append(request)
            self.pool.begin(request)
        new = {place for place, _ in begun}
        for place, request in enumerate(self.requests):
            if place not in new:
                self.pool.grow(request)

    def _sample(self) -> None:
        for request in self.requests:
            request.append_output_token_ids(self.rng.randrange(VOCABULARY))


@dataclass(frozen=True)
class Cost:
    """Microseconds for each request and step. allocation: slots and freeing. hashing: for the prefix cache."""

    size: str
    caching: bool
    allocation: float
    hashing: float


def manager_costs(requests: int, steps: int) -> list[Cost]:
    """All of them take turns, step by step; the first steps do not count."""
    kinds = [(name, caching) for caching in (True, False) for name in SIZES]
    runs = [
        Churn(Pool(SIZES[name], 3 * MEAN * requests // BLOCK * BLOCK, caching), random.Random(0))
        for name, caching in kinds
    ]
    for number in range(steps + max(1, steps // 10)):
        if number == max(1, steps // 10):
            for run in runs:
                run.allocation = run.hashing = 0.0
        for run in runs:
            run.step(requests)
    each = 1e6 / (requests * steps)
    return [Cost(*kind, run.allocation * each, run.hashing * each) for kind, run in zip(kinds, runs, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=positive, default=256, help="at once (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=400, help="of the manager (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=5, help="of conversations (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.1, help="of the mix's KV cache (default: %(default)g)")
    parser.add_argument("--step", action="store_true", help="also time decode steps of two engines")
    parser.add_argument("--graphs", default="off", help="ucm.graphs.mode of these (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    parser.add_argument("--plot", type=Path, help="draws the waste by block size to this file")
    args = parser.parse_args(argv)
    console = report_console(least_width=110)
    console.print(describe_machine(), style="dim")
    found: dict[str, Any] = {"waste": waste(args.requests), "fits": fits(args.share, args.seeds)}
    costs = manager_costs(args.requests, args.steps)
    found["costs"] = [cost.__dict__ for cost in costs]
    console.print(_memory_table(found["waste"], found["fits"]))
    console.print(_cost_table(costs, args.requests))
    if args.step:
        from benchmarks.token_step import measure, step_table

        steps = measure(graphs=args.graphs)
        found["steps"] = [row.__dict__ for row in steps]
        console.print(step_table(steps))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        plot(args.plot)
    return 0


def plot(path: Path, means: Sequence[int] = (220, MEAN, 1760)) -> None:
    """Share of the KV cache that is held and empty, by block size; a line for each mean context."""
    from matplotlib.figure import Figure

    sizes = [1, 16, 32, 64, 128, 256]
    figure = Figure(figsize=(6, 3), dpi=110, layout="constrained")
    axes = figure.subplots()
    for mean_context in means:
        contexts = [round(length * mean_context / MEAN) or 1 for length in lengths(4096, 0)]
        held = [sum(-(-length // size) * size for length in contexts) for size in sizes]
        wasted = [100 * (1 - sum(contexts) / tokens) for tokens in held]
        axes.plot(range(len(sizes)), wasted, marker="o", label=f"{mean_context:,} tokens")
    axes.set_xticks(range(len(sizes)), ["1 (slots)", *map(str, sizes[1:])])
    axes.set_title("held and empty, by mean context", fontsize=9, loc="left")
    axes.set_xlabel("tokens of a block", fontsize=8)
    axes.set_ylabel("% of the KV cache", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _memory_table(wasted: dict[str, float], fitting: dict[str, float]) -> Table:
    table = Table("allocated by", f"waste, mean of {MEAN} tokens", "requests that fit, chat", "")
    base = fitting[f"blocks of {BLOCK}"]
    for name in SIZES:
        table.add_row(name, f"{wasted[name]:.1%}", f"{fitting[name]:.1f}", f"{fitting[name] / base:.2f}x")
    return table


def _cost_table(costs: Sequence[Cost], requests: int) -> Table:
    table = Table("allocated by", "prefix cache", f"allocation, us per request and step at {requests}", "hashing, us")
    for cost in costs:
        table.add_row(cost.size, "yes" if cost.caching else "no", f"{cost.allocation:.2f}", f"{cost.hashing:.2f}")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
