"""Compares the experts of one layer with their peers and the limits of the machine: bytes that must be read, and
products.

usage: python -m benchmarks.moe [--device cuda] [--shape 30b-a3b] [--rows 1 16 ...]

Peers: torch's loop over the experts (on a GPU it waits for the device to know their rows, so it is in no graph),
torch's grouped product, and on a GPU vLLM's Triton kernel with our gate and sum around it. On a GPU calls that can be
are in a CUDA graph, over several layers, so that no weight stays in the second cache.
Weights are representable as 4-bit floats, so that those that stay codes (MXFP4, and 8-bit floats) are the same; their
limit is that of plain weights, too. Each figure has the error of its result.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.moe_vllm import VllmKernel
from vllm_gaudi_ucm.graphs.cost.specs import device_spec
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import can_pack
from vllm_gaudi_ucm.ops.moe.api import (
    Experts,
    mixture_of_experts,
    pack_experts,
    prepare_coded_experts,
    prepare_experts,
)
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes, ExpertPacker
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm.ops.quantised_linear.packed_codes import CodeKind
from vllm_gaudi_ucm.ops.quantised_linear.weight import E2M1, QuantisedWeight
from vllm_gaudi_ucm_tools.output import report_console


class Shape(NamedTuple):
    """Sizes of a layer; `layers`: layers in a graph of a GPU, more than fit in its second-level cache."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    layers: int


SHAPES = {
    "30b-a3b": Shape(128, 8, 2048, 768, 4),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336, 2),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408, 4),
    # a size that a CPU can hold, and a test can run
    "small": Shape(16, 4, 256, 128, 2),
}
REPEATS = 7
# Of a result, relative to float64: a few roundings of bfloat16 for each expert.
MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-4}

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MoeTime:
    """Milliseconds of one layer; None if a peer cannot run. limit: of bytes, and of products. error: relative."""

    side: str
    rows: int
    ms: float | None
    bytes_ms: float
    products_ms: float
    error: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ratio to the limit."""
        return None if self.ms is None else self.ms / max(self.bytes_ms, self.products_ms)


def dense_loop(weights: ExpertWeights) -> Call:
    """torch's products of each expert with its rows, in a loop."""

    def run(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in ids.unique().tolist():
            rows, place = torch.where(ids == number)
            gates, up = functional.linear(x[rows], weights.w13[number]).chunk(2, -1)
            found = functional.linear(functional.silu(gates) * up, weights.w2[number])
            out.index_add_(0, rows, found * shares[rows, place].unsqueeze(1).to(x.dtype))
        return out

    return run


def step_of(inputs: int) -> float:
    """The scale of all weights: a power of two, by which sums of this many inputs are of about one."""
    return float(2.0 ** -round(math.log2(3 * inputs**0.5)))


def stay_codes(weights: ExpertWeights, kind: CodeKind) -> CodedExperts:
    """Returns the same weights as codes, in groups of 32 inputs for MXFP4, otherwise with a scale for each output."""

    def codes_of(plain: Tensor) -> ExpertCodes:
        experts, outputs, inputs = plain.shape
        step, packer = step_of(inputs), ExpertPacker(experts, kind)
        group = 32 if kind == "e2m1" else inputs
        scales = torch.full((outputs, inputs // group), step, device=plain.device)
        for number in range(experts):
            codes = (plain[number].float() / step).to(torch.float8_e4m3fn)
            packer.add(number, QuantisedWeight(codes, scales, (1, group)))
        return packer.finish()

    return CodedExperts(codes_of(weights.w13), codes_of(weights.w2), weights.w13.dtype)


def by_operation(experts: Experts) -> Call:
    """`mixture_of_experts` of an implementation."""
    return lambda x, ids, shares: mixture_of_experts(x, ids, shares, experts)


def sides(weights: Sequence[ExpertWeights]) -> Iterator[tuple[str, bool, Callable[[], list[Call]]]]:
    """Yields (name, whether it may be in a graph, a call for each layer, made when it is measured)."""
    device, spec = weights[0].w13.device.type, MoeSpec()

    def of(name: str) -> Callable[[], list[Call]]:
        return lambda: [by_operation(prepare_experts(each, spec, implementation=name)) for each in weights]

    def of_codes(kind: CodeKind) -> Callable[[], list[Call]]:
        return lambda: [
            by_operation(prepare_coded_experts(stay_codes(each, kind), spec, implementation=fastest))
            for each in weights
        ]

    fastest = "cuda" if device == "cuda" else "cpu"
    yield f"ours ({fastest}, 8-bit floats)", device == "cuda", of_codes("whole")
    yield f"ours ({fastest}, MXFP4)", device == "cuda", of_codes("e2m1")
    if device == "cuda":
        yield "ours (cuda)", True, of("cuda")
        yield "vLLM's kernel", True, lambda: [VllmKernel(each) for each in weights]
    else:
        yield "ours (cpu)", False, of("cpu")
        if can_pack(weights[0].w13):
            yield "ours (cpu, packed)", False, lambda: [by_operation(pack_experts(each, spec)) for each in weights]
    yield "torch, grouped product", device == "cuda", of("grouped")
    yield "torch, loop of experts", False, lambda: [dense_loop(each) for each in weights]


def seconds_of(calls: Sequence[Call], given: tuple[Tensor, Tensor, Tensor], captured: bool) -> float:
    """Median of one layer."""

    def run() -> None:
        for call in calls:
            call(*given)

    run()
    if given[0].device.type != "cuda":
        found = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found) / len(calls)
    replay = run
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
        replay()
    found = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found) / len(calls)


def exact(given: tuple[Tensor, Tensor, Tensor], weights: ExpertWeights, rows: int) -> Tensor:
    """float64, of the first rows."""
    x, ids, shares = (each[:rows] for each in given)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in range(len(x)):
        for number, share in zip(ids[row].tolist(), shares[row].double(), strict=True):
            gates, up = functional.linear(x[row].double(), weights.w13[number].double()).chunk(2)
            out[row] += share * functional.linear(functional.silu(gates) * up, weights.w2[number].double())
    return out


@torch.inference_mode()
def measure(
    shape: Shape, numbers: Sequence[int], device: str, dtype: torch.dtype, peaks: tuple[float, float]
) -> list[MoeTime]:
    """A row for each number of rows and side. peaks: bytes and products per second."""
    random = torch.Generator(device).manual_seed(0)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)

    def draw(*sizes: int) -> Tensor:
        numbers = torch.randint(16, sizes, generator=random, device=device, dtype=torch.uint8)
        return (values * step_of(sizes[-1])).to(dtype)[numbers.int()]

    layers = [
        ExpertWeights(
            draw(shape.experts, 2 * shape.inner, shape.hidden), draw(shape.experts, shape.hidden, shape.inner)
        )
        for _ in range(shape.layers)
    ]
    found = []
    for rows in numbers:
        logits = torch.randn(rows, shape.experts, generator=random, device=device)
        shares, ids = logits.softmax(-1).topk(shape.chosen)
        given = (torch.randn(rows, shape.hidden, generator=random, device=device).to(dtype), ids, shares)
        read = int(ids.unique().numel()) * 3 * shape.inner * shape.hidden + 2 * rows * shape.hidden
        products = 6 * rows * shape.chosen * shape.inner * shape.hidden
        limits = 1e3 * read * dtype.itemsize / peaks[0], 1e3 * products / peaks[1]
        checked = min(rows, 4)
        expected = exact(given, layers[0], checked)
        for name, captured, make in sides(layers):
            try:
                calls = make()
                error = float((calls[0](*given)[:checked].double() - expected).norm() / expected.norm())
                seconds = seconds_of(calls, given, captured)
            except (RuntimeError, ImportError, ValueError) as reason:
                found.append(MoeTime(name, rows, None, *limits, None, str(reason).splitlines()[0][:80]))
                continue
            wrong = not error <= MOST_ERROR[dtype]
            found.append(MoeTime(name, rows, 1e3 * seconds, *limits, error, "WRONG RESULT" if wrong else ""))
    return found


def show(times: Sequence[MoeTime], console: Console) -> None:
    """A table; ratios are to the limit."""
    table = Table("rows", "side", "ms", "limit of bytes, ms", "of products, ms", "ratio", "error", "")
    for one in times:
        figures = ("", "") if one.ms is None else (f"{one.ms:.3f}", f"{one.ratio:.2f}")
        error = "" if one.error is None else f"{one.error:.1e}"
        limits = f"{one.bytes_ms:.3f}", f"{one.products_ms:.3f}"
        table.add_row(str(one.rows), one.side, figures[0], *limits, figures[1], error, one.note)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: 30b-a3b on a GPU, small on a CPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512, 8192])
    parser.add_argument("--bandwidth", type=float, help="bytes per second of the device's memory")
    parser.add_argument("--products", type=float, help="floating-point operations per second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    spec = device_spec("h200" if options.device == "cuda" else "cpu")
    peaks = options.bandwidth or spec.bandwidth, options.products or spec.flops
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    name = options.shape or ("30b-a3b" if options.device == "cuda" else "small")
    times = measure(SHAPES[name], options.rows, options.device, dtype, peaks)
    console = report_console(least_width=140)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{name} {tuple(SHAPES[name])}, {dtype}, {where}, torch {torch.__version__}")
    show(times, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in times], indent=2) + "\n")


if __name__ == "__main__":
    main()
