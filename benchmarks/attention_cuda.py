"""Attention of one layer on a GPU: ours, vLLM's Triton kernels and torch SDPA in one run, interleaved, in CUDA graphs.

`python -m benchmarks.attention --device cuda [--sweep | --rows | --variants | --models | --small | --gaudi-form]`. 32
query and 8 kv heads of 128, blocks of 128 tokens, bf16, the parts as a bucket has them. Every result is poisoned before
its run and compared with float64. If vLLM is not installed, its columns are empty. SDPA is given contiguous keys, which
a paged cache never has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import attention_cuda_models as models
from benchmarks import attention_cuda_rows as several_rows
from benchmarks.attention_cuda_case import CASES, Batch, Case, Model, make_batch
from benchmarks.attention_cuda_result import OURS, Result
from benchmarks.attention_cuda_sides import Side, gaudi_form, ours, sdpa, vllm_triton
from benchmarks.attention_cuda_sweep import sweep
from benchmarks.positive import positive
from vllm_gaudi_ucm.ops.unified_attention.api import prepare
from vllm_gaudi_ucm_tools.output import report_console

Sides = dict[str, Side | None]
OWN = (OURS, several_rows.BUCKET)
GATE = 1e-2  # relative L2 error, bf16
INNER = 5  # calls in one graph, so that the launch of the graph does not count


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if not torch.cuda.is_available():
        print("benchmarks.attention: found no CUDA GPU, expected one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    rate = copy_rate(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, copies at {rate / 1e12:.2f} TB/s")
    one = partial(measure, rate=rate, repeats=args.repeats, device=device)
    if args.gaudi_form:
        one = partial(one, peers=gaudi_forms)
    if args.sweep:
        results = sweep(partial(one, peers=kernels), report_console(least_width=120))
    elif args.models:
        results = models.measure_all(one, args.variants)
    elif args.small:
        results = models.measure_small(one)
    else:
        cases = CASES
        if args.rows or args.variants:
            cases = several_rows.CASES
            peers = several_rows.variant_sides if args.variants else several_rows.sides
            one = partial(one, peers=peers, parts=several_rows.planned, least_ms=several_rows.least_ms)
        results = []
        for case in cases:
            results.append(one(case))
            print(results[-1].line(), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    judged = [error for result in results for name, error in result.errors.items() if args.gaudi_form or name in OWN]
    return int(max(judged) > GATE)


def kernels(batch: Batch) -> Sides:
    """vLLM's, over the same paged cache."""
    return {"triton 2d": vllm_triton(batch, split=False), "triton 3d": vllm_triton(batch, split=True)}


def kernels_and_sdpa(batch: Batch) -> Sides:
    """vLLM's, and torch's over contiguous keys."""
    return kernels(batch) | {
        "sdpa flash": sdpa(batch, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(batch, SDPBackend.CUDNN_ATTENTION),
    }


def gaudi_forms(batch: Batch) -> Sides:
    """Computes Gaudi's form here, to check it long before it is fast."""
    return {"hpu eager": gaudi_form(batch, compiled=False), "hpu inductor": gaudi_form(batch, compiled=True)}


def measure(
    case: Case,
    rate: float,
    repeats: int,
    device: torch.device,
    peers: Callable[[Batch], Sides] = kernels_and_sdpa,
    parts: Callable[[Batch], Batch] = lambda batch: batch,
    least_ms: Callable[[Batch, float], float] = lambda batch, rate: batch.bytes / rate * 1e3,
    model: Model = models.LLAMA,
) -> Result:
    """Measures A B C A B C: every contender in turn, and the median of each.

    parts: gives the batch parts other than a bucket's. least_ms: the limit by bytes per second.
    """
    batch = parts(make_batch(case, model, device))
    sides: Sides = {OURS: ours(batch, "auto")} | peers(batch)
    there = {name: side for name, side in sides.items() if side is not None}
    result = Result(case.name, case.goal, least_ms(batch, rate), _median(_graph(lambda: _plan(batch)), repeats))
    graphs = {name: _graph(side.run) for name, side in there.items()}
    samples: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(repeats):
        for name, graph in graphs.items():
            there[name].written().fill_(float("nan"))
            samples[name].append(_milliseconds(graph))
    for name, side in there.items():
        result.milliseconds[name] = statistics.median(samples[name])
        result.errors[name] = relative_error(batch, side.rows())
    return result


def relative_error(batch: Batch, out: Tensor) -> float:
    """Relative L2 error of some rows against float64; infinite if any row is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    last = batch.query.shape[0] - 1
    rows = sorted({0, min(1, last), last // 3, last // 2, max(last - 1, 0), last})
    exact = torch.stack([batch.exact(row) for row in rows])
    return float((out[rows].double() - exact).norm() / exact.norm())


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a kernel over 4 GB; a plain copy may go through a slower copy engine."""
    source = torch.empty(2**30, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (_median(_graph(lambda: torch.neg(source, out=target)), 9) / 1e3)


def _plan(batch: Batch) -> None:
    prepare(batch.parts, batch.model.block_size)


def _graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """INNER calls as one graph; the first call, outside of it, compiles the kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(INNER):
            run()
    return graph


def _median(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    return statistics.median(_milliseconds(graph) for _ in range(repeats))


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Returns the milliseconds of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / INNER


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention --device cuda", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=9, help="samples of each contender")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="requests x shared prefixes, and a mixed batch")
    what.add_argument("--rows", action="store_true", help="requests with several rows after a cached context")
    what.add_argument("--models", action="store_true", help="windows, sinks, soft caps and latents of models")
    what.add_argument("--small", action="store_true", help="short shared prefixes, one KV head, small blocks")
    what.add_argument("--gaudi-form", action="store_true", help="also run the implementation for Gaudi, on this GPU")
    parser.add_argument("--variants", action="store_true", help="--rows, or windows of --models, with other tiles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
