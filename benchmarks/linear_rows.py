"""Linear layers of a few rows on a CPU, in each way that they can be multiplied, and the way that the plugin takes.

`python -m benchmarks.linear_rows --dtype bfloat16 --shapes smollm2 8b`; offline, and without vLLM. Many weights of a
shape are multiplied in turn, as in a model, so that they come from memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.packed_linear import api
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PACK_FOR_ROWS, PackedWeight, multiply_form, multiply_pairs, pack
from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, learn_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind, Way

# outputs and inputs of a layer's weights, and of the output head
SHAPES = {
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 1024)
FROM_MEMORY = 64 << 20  # bytes that copies of a weight have together
MOST_COPIES = 24

Product = Callable[[Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    console = Console(highlight=False, width=120)
    dtype = getattr(torch, args.dtype)
    if dtype == torch.bfloat16 and api.multiplies_pairs():
        learn_ways({Kind.PAIRS})
    for threads in args.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        console.print(f"{describe_machine()}; {args.dtype}, {threads} threads; matrix unit {matrix_unit.available()}")
        for outputs, inputs in (shape for name in args.shapes for shape in SHAPES[name]):
            console.print(_table(outputs, inputs, dtype, args))
    return 0


def _table(outputs: int, inputs: int, dtype: torch.dtype, args: argparse.Namespace) -> Table:
    weights = _weights(outputs, inputs, dtype)
    learn_ways(kinds_of(weights))
    products = _products(weights, dtype)
    table = Table(
        title=f"{outputs} x {inputs}, us a product", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("rows", *products, "best other / ours"):
        table.add_column(name, justify="right")
    for rows in args.rows:
        x = torch.randn(rows, inputs).to(dtype)
        repeats = max(2, min(args.repeats, int(args.repeats * 64 / rows)))
        found: dict[str, list[float]] = {name: [] for name in products}
        for turn in range(-1, repeats):
            for name, product in products.items():
                seconds = product(x)
                if turn >= 0:
                    found[name].append(seconds)
        medians = {name: statistics.median(values) * 1e6 for name, values in found.items()}
        others = min(value for name, value in medians.items() if name != "ours")
        table.add_row(str(rows), *(f"{value:.0f}" for value in medians.values()), f"{others / medians['ours']:.2f}")
    return table


def _weights(outputs: int, inputs: int, dtype: torch.dtype) -> list[PackedWeight]:
    size = outputs * inputs * dtype.itemsize
    return [
        pack(torch.randn(outputs, inputs).to(dtype), compact=False)
        for _ in range(max(1, min(MOST_COPIES, -(-FROM_MEMORY // size))))
    ]


def _products(weights: list[PackedWeight], dtype: torch.dtype) -> dict[str, Callable[[Tensor], float]]:
    first = weights[0]
    found: dict[str, list[Product]] = {}
    if first.pairs is not None:
        found["pairs"] = [_pairs(weight, tiles=False) for weight in weights]
        if api.has_pair_tiles(first.inputs):
            found["tiles"] = [_pairs(weight, tiles=True) for weight in weights]
    elif first.panels is not None:
        found["vectors"] = [_panels(weight, tiles=False) for weight in weights]
        if matrix_unit.available():
            found["tiles"] = [_panels(weight, tiles=True) for weight in weights]
    found[Way.ONEDNN] = [_onednn(weight, dtype) for weight in weights]
    found["ours"] = [_ours(weight) for weight in weights]
    return {name: _timed(products) for name, products in found.items()}


def _pairs(weight: PackedWeight, tiles: bool) -> Product:
    assert weight.pairs is not None
    return lambda x: multiply_pairs(x, weight.pairs, None, tiles)


def _panels(weight: PackedWeight, tiles: bool) -> Product:
    assert weight.panels is not None
    return lambda x: multiply_form(x, weight.panels, weight.outputs, None, tiles)


def _onednn(weight: PackedWeight, dtype: torch.dtype) -> Product:
    copy = weight.tensor
    if copy is None:
        plain = torch.randn(weight.outputs, weight.inputs).to(dtype)
        copy = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, copy, None, "none", [], "")


def _ours(weight: PackedWeight) -> Product:
    return lambda x: api.packed_linear(x, weight)


def _timed(products: list[Product]) -> Callable[[Tensor], float]:
    def run(x: Tensor) -> float:
        begin = time.perf_counter()
        for product in products:
            product(x)
        return (time.perf_counter() - begin) / len(products)

    return run


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_rows", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["smollm2"], help="models")
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS))
    parser.add_argument("--threads", type=positive, nargs="+", help="default: torch's")
    parser.add_argument("--repeats", type=positive, default=15)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
