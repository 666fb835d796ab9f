"""Tensor parallelism on a CPU: compares blocks chosen by the scores of all heads with those chosen on each rank by its
own heads.

Quality: the demo model's heads are shared out among three ranks, and each choice is judged by the attention of the
rank's own heads. Speed: one layer on two ranks over gloo, each step of them by both choices in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.sparse_attention_workload import Model, Workload
from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import Method, all_methods, select
from benchmarks.sparse_quality import LAST, MODEL
from benchmarks.sparse_recall import recall
from benchmarks.sparse_rows import DecodedRows, load_causal
from benchmarks.sparse_step import Step
from benchmarks.sparse_text import find_text, read_text

KIND = "box_mean"  # the default summary
RANKS = 3  # of the demo model, which has three KV heads
HALF = Model(16, 4, 128)  # of a common 8B model, on each of two ranks
BUDGET = 0.1
CHOICES = "per_rank", "per_rank, three calls", "all"


def parts(step: Step, ranks: int) -> Iterator[Step]:
    """The data of a step on each rank."""
    for query, keys in zip(step.query.chunk(ranks, 1), step.keys.chunk(ranks, 1), strict=True):
        yield Step(step.layer, query, keys, step.contexts, step.scale, step.block_size)


def judge(step: Step, method: Method, budgets: Sequence[Budget], ranks: int = RANKS) -> list[tuple[float, ...]]:
    """Returns for each budget the attention mass on the blocks of all heads and on each rank's own, and the share of
    candidates on which a rank agrees with all heads. The method's scores do not depend on the budget.
    """
    split = list(parts(step, ranks))
    together, alone = method.scores(step, budgets[0]), [method.scores(part, budgets[0]) for part in split]
    found = []
    for budget in budgets:
        shared = select(together, step, budget)
        counted = shared & budget.candidates(step.row_blocks, step.num_blocks)
        own = [select(scores, part, budget) for part, scores in zip(split, alone, strict=True)]
        masses = [recall(part, chosen) for part, chosen in zip(split, own, strict=True)]
        same = [float((chosen & counted).sum() / counted.sum().clamp(min=1)) for chosen in own]
        found.append((recall(step, shared), statistics.fmean(masses), statistics.fmean(same)))
    return found


def quality(model: Path, context: int, sampled: int, sizes: Sequence[int], budgets: Sequence[float]) -> None:
    """Prints one line for each block size and budget: means over rows and layers."""
    from transformers import AutoTokenizer

    text = read_text(find_text())[: 8 * context]
    tokens = AutoTokenizer.from_pretrained(model)(text, truncation=True, max_length=context)["input_ids"]
    last = min(LAST, context // 2)
    rows = DecodedRows(load_causal(model), torch.tensor(tokens), len(tokens) - last)
    picked = torch.arange(0, last, max(1, last // sampled))
    (method,) = (one for one in all_methods() if one.name == KIND)
    print(f"{'block':>6}{'budget':>8}{'mass, all':>11}{'mass, per_rank':>16}{'same blocks':>13}")
    for size in sizes:
        layers: list[list[tuple[float, ...]]] = []

        def record(step: Step, layers: list[list[tuple[float, ...]]] = layers) -> None:
            few = Step(step.layer, step.query[picked], step.keys, step.contexts[picked], step.scale, step.block_size)
            layers.append(judge(few, method, [Budget(budget) for budget in budgets]))

        rows.logits(record, size)
        for budget, figures in zip(budgets, zip(*layers, strict=True), strict=True):
            shared, own, same = (statistics.fmean(column) for column in zip(*figures, strict=True))
            print(f"{size:>6}{budget:>8.0%}{shared:>11.1%}{own:>16.1%}{same:>13.1%}", flush=True)


def mean_over_group(own: Tensor) -> Tensor:
    """Like `RankMean`, without an engine's groups."""
    mean = own / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def layer_times(requests: int, context: int, repeats: int) -> list[list[float]]:
    """Milliseconds of a layer, by repeat in the order of CHOICES; every rank begins a step when all are there."""
    workload = Workload(HALF, requests, context)
    over_ranks = None, torch.clone, mean_over_group
    contenders = [workload.sparse(BUDGET, one) for one in over_ranks]
    layers = cycle(range(workload.layers))
    times: list[list[float]] = [[] for _ in contenders]
    for repeat in range(repeats + 1):
        for contender, spent in zip(contenders, times, strict=True):
            layer, inputs = next(layers), contender.fresh()
            dist.barrier()
            start = time.perf_counter()
            contender.run(layer, inputs)
            if repeat:  # the first round allocates
                spent.append((time.perf_counter() - start) * 1e3)
    return times


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    """One of two ranks; the first prints."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for requests in options.requests:
        for context in options.contexts:
            times = layer_times(requests, context, options.repeats)
            # on a busy machine a median shows how long ranks wait for a core, the fastest how long they compute
            for kind, pick in (("median", statistics.median), ("fastest", min)):
                alone, calls, together = (pick(spent) for spent in times)
                if rank == 0:
                    ratios = f"{calls / alone:>23.2f}x{together / alone:>7.2f}x"
                    print(f"{requests:>9}{context:>9} {kind:<8}{alone:>12.3f} ms{ratios}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--context", type=int, default=8000, help="tokens of the text; 0: no quality")
    parser.add_argument("--rows", type=int, default=32, help="rows that quality is sampled on")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=101)
    options = parser.parse_args()
    print(describe_machine())
    if options.context:
        quality(options.model, options.context, options.rows, options.block_sizes, options.budgets)
    first, *others = CHOICES
    print(f"{'requests':>9}{'context':>9}{'':9}{first:>15}" + "".join(f"{name:>{len(name) + 3}}" for name in others))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/store", options), nprocs=2)


if __name__ == "__main__":
    main()
