"""The KV cache after many arrivals and ends: with vLLM's queue, with contiguous blocks first, and with compaction.

`python -m benchmarks.compaction [--steps N] [--blocks N] [--plot FILE]`. vLLM's real manager of blocks, no model. In
each step a request begins, ends, or one of them needs a block more. Times are of one process, one rule after the other.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track
from rich.table import Table
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.positive import positive
from vllm_gaudi_ucm.block_policies.compaction.compaction import Compaction
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager
from vllm_gaudi_ucm_tools.output import report_console

RULES = ("vLLM", "contiguous first", "compaction")
COLOURS = ("#D55E00", "#E69F00", "#0072B2")
BLOCK = 128
EACH = 100
LONGEST = 64 * BLOCK


class Churn:
    """One KV cache and its requests; half of the blocks are in use on average."""

    def __init__(self, rule: str, num_blocks: int) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 2 * LONGEST, BLOCK, BLOCK, enable_caching=False)
        self.totals, self.compaction = MemoryTotals(), None
        if rule != RULES[0]:
            policy = Compaction(self.totals)
            self.manager = BlockManager.from_manager(self.manager, [policy])
            self.compaction = policy if rule == RULES[2] else None
        self.num_blocks = num_blocks
        self.live: list[Request] = []
        self.rng = random.Random(0)
        self.seconds, self.allocated = 0.0, 0
        self.densities: list[float] = []

    def step(self, number: int) -> None:
        if self.compaction is not None:
            self.compaction.step(is_quiet=False)
        in_use = self.num_blocks - self.manager.block_pool.get_num_free_blocks()
        chance = self.rng.random()
        if self.live and chance < 0.1 * 2 * in_use / self.num_blocks:
            request = self.live.pop(self.rng.randrange(len(self.live)))
            self.manager.free(request)
        elif chance > 0.9:
            tokens = [0] * self.rng.randrange(1, LONGEST // 4)
            request = Request(str(number), tokens, SamplingParams(max_tokens=1), None)
            if self._allocate(request, len(tokens)):
                self.live.append(request)
        elif self.live:
            request = self.rng.choice(self.live)
            if request.num_tokens < LONGEST:
                request.append_output_token_ids([0] * BLOCK)
                self._allocate(request, BLOCK)

    def _allocate(self, request: Request, count: int) -> bool:
        begin = time.perf_counter()
        found = self.manager.allocate_slots(request, count)
        self.seconds += time.perf_counter() - begin
        self.allocated += 1
        if found is not None:
            request.num_computed_tokens += count
        return found is not None

    def look(self) -> None:
        held = [block for request in self.live for block in self.manager.get_block_ids(request.request_id)[0]]
        self.densities.append((len(held) + 1) / (max(held, default=0) + 1))

    def runs(self) -> float:
        tables = [self.manager.get_block_ids(request.request_id)[0] for request in self.live]
        breaks = sum(b != a + 1 for table in tables for a, b in pairwise(table))
        return (breaks + len(tables)) / max(1, len(tables))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive, default=100_000)
    parser.add_argument("--blocks", type=positive, default=4_000)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the density over time there")
    args = parser.parse_args(arguments)
    table = Table("rule", "density at the end", "least", "runs per request", "moved per step", "us per allocation")
    found: dict[str, list[float]] = {}
    for rule in RULES:
        churn = Churn(rule, args.blocks)
        for number in track(range(args.steps), rule, transient=True):
            churn.step(number)
            if number % EACH == EACH - 1:
                churn.look()
        moved, cost = churn.totals.moves / args.steps, 1e6 * churn.seconds / churn.allocated
        densities = found[rule] = churn.densities
        settled = densities[len(densities) // 4 :]
        table.add_row(
            rule,
            f"{densities[-1]:.2f}",
            f"{min(settled):.2f}",
            f"{churn.runs():.1f}",
            f"{moved:.2f}",
            f"{cost:.1f}",
        )
    report_console(least_width=110).print(table)
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def plot(densities: Mapping[str, Sequence[float]], path: Path) -> None:
    """The density over time under each rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=110, layout="constrained")
    axes = figure.subplots()
    for (rule, values), colour in zip(densities.items(), COLOURS, strict=True):
        steps = [EACH * (index + 1) for index in range(len(values))]
        axes.plot(steps, [100 * value for value in values], color=colour, linewidth=0.8, label=rule)
    axes.axhline(90, color="grey", linewidth=0.6, linestyle="--")
    axes.set_title("blocks in use, of those up to the highest in use", fontsize=9, loc="left")
    axes.set_xlabel("steps", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8, frameon=False, loc="lower center", ncols=3)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
