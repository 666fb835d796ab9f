"""The choice by the fitted cost model against the best way, and against never splitting shared prefixes, on CPU.

`python -m benchmarks.attention_choice`: fits, then measures steps that the fit has not seen: 1 to 64 requests, 0 to
8192 tokens of a shared prefix, decodes and prompt chunks. 32 query and 8 kv heads of 128, blocks of 128 tokens, fp32; a
way's time is the least of interleaved samples, a layer's with its share of what is derived once for all layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.attention_case import BLOCK_SIZE, DIM, HEADS, KV_HEADS, SCALE, Case, make_data
from benchmarks.attention_choice_result import CaseResult, report, to_json
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.execution.staging import Staging
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.fit import fit, measure, ways_of
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import uses_of
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way, candidates, cheapest_way

CPU = torch.device("cpu")
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, DIM, 4, layers=32)
PREFIXES = (0, 128, 512, 2048, 8192)
DECODE_REQUESTS, CHUNK_REQUESTS = (1, 2, 3, 8, 24, 64), (2, 8, 16)
OWN = 192  # tokens of a decode's own context
CHUNK = 32
LEFT_OUT = 4.0  # a way that took so many times as long as the fastest is not measured again


def cases() -> Iterator[Case]:
    """Decodes, then chunks, over the grid."""
    for prefix in PREFIXES:
        for requests in DECODE_REQUESTS:
            yield Case(f"{requests} decodes", requests, prefix + OWN - 1, 1, shared=prefix)
        for requests in CHUNK_REQUESTS:
            yield Case(f"{requests} chunks of {CHUNK}", requests, prefix, CHUNK, shared=prefix)


def measure_case(case: Case, model: CostModel, repeats: int) -> CaseResult:
    """All ways of one step, interleaved."""
    data = make_data(case)
    each = np.ones(case.requests, np.int32)
    batch = BatchInput(each * case.context, each * case.new, each * case.tokens, data.block_tables.numpy())
    plan = plan_batch(batch, BLOCK_SIZE)
    staged = Staging(CPU, contiguous_pa=False).stage(plan, np.zeros(plan.num_rows, np.int64))
    uses = uses_of(staged.parts, BLOCK_SIZE)
    result = CaseResult(case, cheapest_way(model, uses, SHAPE, candidates("cpu")))
    ways = list(dict.fromkeys([*ways_of(uses, "cpu"), result.chosen]))
    key, value = (cache.flatten(0, 1)[staged.slots] for cache in (data.keys, data.values))

    def run(way: Way) -> float:
        start = time.perf_counter()
        ready = prepare(staged.parts, BLOCK_SIZE, implementation=way.implementation, unsplit=way.unsplit)
        derived = time.perf_counter() - start
        for _ in range(2):  # the first call makes room
            start = time.perf_counter()
            unified_attention(data.query, key, value, data.keys, data.values, ready, SCALE)
            layer = time.perf_counter() - start
        return layer + derived / SHAPE.layers

    for repeat in range(repeats):
        for way in ways:
            result.seconds.setdefault(way, []).append(run(way))
        least = min(seconds[0] for seconds in result.seconds.values())
        if not repeat:
            ways = [way for way in ways if way == result.chosen or result.least(way) <= LEFT_OUT * least]
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Fits, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_choice", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=5, help="samples of each way")
    parser.add_argument("--threads", type=positive, help="threads of torch (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    grid = list(cases())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("fitting", total=1.0)
        model = fit(measure(CPU, lambda done: progress.update(task, completed=done)))
        task = progress.add_task("measuring", total=len(grid))
        results = []
        for case in grid:
            progress.update(task, description=f"{case.name}, prefix {case.shared}")
            results.append(measure_case(case, model, args.repeats))
            progress.advance(task)
    console = Console(highlight=False, width=100)
    console.print(f"{describe_machine()}; {torch.get_num_threads()} threads; least of {args.repeats}", style="dim")
    report(results, console)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": describe_machine(), **to_json(results)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
