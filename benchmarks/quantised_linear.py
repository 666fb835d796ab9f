"""Compares products with a quantised weight with their peers and the limits of the machine: bytes read, and products.

usage: python -m benchmarks.quantised_linear [--device cuda] [--shape 4096 14336] [--rows 1 16 ...]

Sides: what a server would choose for each kind of weight (`choose_product`), and the Triton kernel of codes if that is
different. Peers: the dequantised weight by torch's product, and torch's scaled product of rows that were narrowed
before. On a GPU calls are in a CUDA graph, over several layers, so that no weight stays in the second cache; on a CPU
all weights but those of W8A8 are plain, and the kernel runs under Triton's interpreter alone. Each figure has the error
of its result, relative to float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vllm_gaudi_ucm.graphs.cost.specs import device_spec
from vllm_gaudi_ucm.ops.quantised_linear.api import Product, Target, choose_product, dequantise
from vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8 import CpuInt8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import FEW_ROWS, CudaCodes, CudaFp8, narrow_rows
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.int8 import CudaInt8
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, RowRounding
from vllm_gaudi_ucm_tools.output import report_console

E4M3 = torch.float8_e4m3fn
KINDS = ("fp8 per tensor", "fp8 per channel", "fp8 per block", "W4A16", "W8A8")
GROUP, BLOCK = 128, 128
# Of a GPU's weights: beyond its second cache together.
LAYERS = 4
REPEATS = 9
# Products of a GPU's 8-bit numbers per second, as many times those of bfloat16.
NARROW_FASTER = 2
# Relative to float64: rows that are rounded to 8 bits, and others.
MOST_ERROR = {True: 0.05, False: 0.01}

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearTime:
    """Milliseconds of one layer. limit: of bytes, or of products in the rows' dtype on that side. error: relative."""

    kind: str
    side: str
    rows: int
    ms: float
    limit_ms: float
    error: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Ratio to the limit."""
        return self.ms / self.limit_ms


def make_weight(kind: str, outputs: int, inputs: int, device: str, seed: int) -> QuantisedWeight:
    """Random, with elements as large as those of a layer whose results are about as large as its rows."""
    random = torch.Generator(device).manual_seed(seed)
    size = inputs**-0.5
    if kind == "W4A16":
        codes = torch.randint(16, (outputs, inputs), generator=random, device=device, dtype=torch.uint8)
        shape = outputs, -(-inputs // GROUP)
        scales = (torch.rand(shape, generator=random, device=device) + 0.5) * size / 4
        return QuantisedWeight(codes, scales, (1, GROUP), torch.full(shape, 8, dtype=torch.uint8, device=device))
    if kind == "W8A8":
        codes = torch.randint(-127, 128, (outputs, inputs), generator=random, device=device, dtype=torch.int8)
        scales = (torch.rand(outputs, 1, generator=random, device=device) + 0.5) * size / 73
        return QuantisedWeight(codes, scales, (1, inputs), None, RowRounding())
    block = {"fp8 per tensor": (outputs, inputs), "fp8 per channel": (1, inputs), "fp8 per block": (BLOCK, BLOCK)}[kind]
    values = torch.randn(outputs, inputs, generator=random, device=device) * 60
    shape = -(-outputs // block[0]), -(-inputs // block[1])
    scales = (torch.rand(shape, generator=random, device=device) + 0.5) * size / 60
    found = QuantisedWeight(values.clamp(-448, 448).to(E4M3), scales, block)
    if kind == "fp8 per tensor":
        # as the formats of checkpoints hand it over
        return QuantisedWeight(found.codes, found.scales.expand(outputs, 1).contiguous(), (1, inputs))
    return found


def by_product(product: Product, weight: QuantisedWeight) -> Call:
    """The product as a layer calls it."""
    layer = nn.Module()
    for name, tensor in product.pack(weight).items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    return lambda x: product.multiply(x, layer, None)


def by_written_out(weight: QuantisedWeight, dtype: torch.dtype) -> Call:
    plain = dequantise(weight, dtype)
    return lambda x: nn.functional.linear(x, plain)


def by_scaled_product(weight: QuantisedWeight, x: Tensor) -> Call:
    """torch's alone: the rows were narrowed before."""
    narrow, scale = narrow_rows(x)
    codes, scales = weight.codes.t(), weight.scales.reshape(1, -1)
    return lambda x: torch._scaled_mm(narrow, codes, scale_a=scale, scale_b=scales, out_dtype=x.dtype)


def sides(kind: str, weights: Sequence[QuantisedWeight], x: Tensor) -> Iterator[tuple[str, bool, list[Call]]]:
    """(name, whether rows are narrowed, a call for each layer)."""
    device = x.device.type
    products = [choose_product(weight, Target(device, x.dtype)) for weight in weights]
    is_scaled = isinstance(products[0], CudaFp8)
    rounds = isinstance(products[0], CpuInt8 | CudaInt8)
    narrows = rounds or (is_scaled and len(x) > FEW_ROWS)
    if products[0] is not None:
        name = "ours, integers" if rounds else "ours, scaled product" if narrows else "ours, codes"
        yield name, narrows, [by_product(p, w) for p, w in zip(products, weights, strict=True) if p is not None]
    if device == "cuda" and narrows and all(CudaCodes.covers(weight) for weight in weights):
        yield "ours, codes", False, [by_product(CudaCodes(weight), weight) for weight in weights]
    if is_scaled:
        yield "torch, scaled product alone", True, [by_scaled_product(weight, x) for weight in weights]
    yield f"torch, written out in {x.dtype}", False, [by_written_out(weight, x.dtype) for weight in weights]


def seconds_of(calls: Sequence[Call], x: Tensor) -> float:
    """Median of one layer."""

    def run() -> None:
        for call in calls:
            call(x)

    run()
    found = []
    if x.device.type != "cuda":
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found) / len(calls)


@torch.inference_mode()
def measure(
    kind: str, shape: tuple[int, int], numbers: Sequence[int], device: str, peaks: tuple[float, float]
) -> list[LinearTime]:
    """A row for each number of rows and side. shape: outputs, inputs. peaks: bytes and products per second."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    outputs, inputs = shape
    weights = [make_weight(kind, *shape, device, seed) for seed in range(LAYERS if device == "cuda" else 1)]
    codes = outputs * inputs * (0.5 if kind == "W4A16" else 1)
    found = []
    for rows in numbers:
        x = torch.randn(rows, inputs, device=device, generator=torch.Generator(device).manual_seed(rows)).to(dtype)
        checked = min(rows, 8)
        expected = x[:checked].double() @ dequantise(weights[0], torch.float32).double().T
        for name, narrows, calls in sides(kind, weights, x):
            weight = outputs * inputs * dtype.itemsize if "written out" in name else codes
            read = weight + rows * (inputs + outputs) * dtype.itemsize
            products = 2 * rows * outputs * inputs / (NARROW_FASTER if narrows else 1)
            limit = 1e3 * max(read / peaks[0], products / peaks[1])
            error = float((calls[0](x)[:checked].double() - expected).norm() / expected.norm())
            wrong = "" if error <= MOST_ERROR[narrows] else "WRONG RESULT"
            found.append(LinearTime(kind, name, rows, 1e3 * seconds_of(calls, x), limit, error, wrong))
    return found


def show(times: Sequence[LinearTime], console: Console) -> None:
    """A table; ratios are to the limit of each side."""
    table = Table("weight", "rows", "side", "ms", "limit, ms", "ratio", "error", "")
    for one in times:
        figures = f"{one.ms:.4f}", f"{one.limit_ms:.4f}", f"{one.ratio:.2f}", f"{one.error:.1e}"
        table.add_row(one.kind, str(one.rows), one.side, *figures, one.note)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised_linear", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, metavar=("OUTPUTS", "INPUTS"), help="(default: 14336 4096)")
    parser.add_argument("--rows", type=int, nargs="+", help="(default: 1 16 64 2048)")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--bandwidth", type=float, help="bytes per second of the device's memory")
    parser.add_argument("--products", type=float, help="operations per second of the device's bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    spec = device_spec("h200" if on_gpu else "cpu")
    peaks = options.bandwidth or spec.bandwidth, options.products or spec.flops
    shape = tuple(options.shape or ((14336, 4096) if on_gpu else (1024, 512)))
    numbers = options.rows or ([1, 16, 64, 2048] if on_gpu else [1, 16])
    times = [time for kind in options.kinds for time in measure(kind, shape, numbers, options.device, peaks)]
    console = report_console(least_width=130)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{shape[0]} outputs, {shape[1]} inputs, {where}, torch {torch.__version__}")
    show(times, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in times], indent=2) + "\n")


if __name__ == "__main__":
    main()
