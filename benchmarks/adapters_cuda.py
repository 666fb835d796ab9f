"""Adapters (LoRA) in the linear layers of a decoder on a GPU: the time that they add to a layer, by rows and by ways.

Decoder layers of an 8B shape without attention, bfloat16, adapters of rank 16 in all four linear layers, in a CUDA
graph whose weights no cache holds. Every way is first compared with the reference. Rows take the active adapters in
turn; `other` is a further implementation, by name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.layers_cuda import graph_microseconds
from benchmarks.positive import positive
from vllm_gaudi_ucm.ops.cuda.side_by_side import compiled_side_by_side
from vllm_gaudi_ucm.ops.lora.api import Routes, add_adapters, begin_adapters, route_rows
from vllm_gaudi_ucm.ops.lora.impl.cuda.ways import MEASURED_ROWS, Way, set_times
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import cuda_rms_norm
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate
from vllm_gaudi_ucm_tools.output import report_console

HIDDEN, INNER, RANK = 4096, 14336, 16
LINEAR: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (4096, 1024, 1024)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
# Layers with weights of their own, and layers in a graph.
MADE, CALLS, REPEATS = 2, 8, 9
NOTHING = "none"


class Linear(NamedTuple):
    """weight: [outputs, inputs]."""

    weight: Tensor
    adapters: AdapterWeights


Layer = dict[str, Linear]


@dataclass(frozen=True)
class LayerTime:
    """Median microseconds of a decoder layer. adapters: how they are computed; `none` for a layer without them. active:
    adapters that the rows have.
    """

    adapters: str
    rows: int
    active: int
    layer_us: float


def make_layer(slots: int, sizes: dict[str, tuple[int, tuple[int, ...]]], device: torch.device) -> Layer:
    """Returns a layer with random weights, and random adapters in all slots. sizes: as `LINEAR`."""
    made = {}
    for name, (inputs, outputs) in sizes.items():
        weight = torch.randn(sum(outputs), inputs, dtype=torch.bfloat16, device=device) * inputs**-0.5
        adapters = AdapterWeights.joined_with(weight, outputs, slots, RANK)
        adapters.down.normal_(std=inputs**-0.5)
        adapters.up.normal_(std=RANK**-0.5)
        made[name] = Linear(weight, adapters)
    return made


def linear(x: Tensor, one: Linear, routes: Routes | None) -> Tensor:
    """Computes a linear layer with its adapters, as vLLM's layers do; without them if routes are None."""
    if routes is None:
        return functional.linear(x, one.weight)
    begun = begin_adapters(x, routes, one.adapters)
    own = None if begun is None else begun.own
    return add_adapters(functional.linear(x, one.weight) if own is None else own, x, routes, one.adapters, begun)


def decoder_layer(x: Tensor, residual: Tensor, norm: Tensor, layer: Layer, routes: Routes | None) -> Tensor:
    """Computes a layer, with queries in place of attention's result."""
    query = linear(x, layer["qkv"], routes)[:, : x.shape[1]]
    found, _ = cuda_rms_norm(linear(query, layer["o"], routes), norm, 1e-5, residual, in_place=True)
    gates = cuda_gate(linear(found, layer["gate_up"], routes))
    return cuda_rms_norm(linear(gates, layer["down"], routes), norm, 1e-5, residual, in_place=True)[0]


def force(way: Way) -> None:
    """Has all steps computed this way."""
    set_times({each: (float(each is not way),) * len(MEASURED_ROWS) for each in Way})


def ways(others: Sequence[str], slots: Tensor, count: int) -> Iterator[tuple[str, Routes]]:
    """Yields each way that adapters are computed, in force until the next one, and routes for it."""
    for way in Way:
        force(way)
        yield way.value, route_rows(slots, count, RANK, implementation="cuda", captured=True)
    for name in others:
        yield name, route_rows(slots, count, RANK, implementation=name, captured=True)


def check(others: Sequence[str], slots: Tensor, layer: Layer) -> None:
    """Compares each way with the reference. Raises ValueError unless they agree."""
    rows = len(slots)
    for name, one in layer.items():
        x = torch.randn(rows, one.weight.shape[1], dtype=torch.bfloat16, device=slots.device)
        reference = route_rows(slots, one.adapters.slots, RANK, implementation="reference")
        expected = linear(x, one, reference).float()
        plain = linear(x, one, None).float()
        for way, routes in ways(others, slots, one.adapters.slots):
            error = (linear(x, one, routes).float() - expected).abs().max().item()
            if not error <= 0.02 * max(expected.abs().max().item(), plain.abs().max().item()):
                raise ValueError(
                    f"{name}, {rows} rows, {way}: found an error of {error}, expected roundings of bfloat16"
                )


@torch.inference_mode()
def measure(numbers: Sequence[int], slots: int, others: Sequence[str]) -> list[LayerTime]:
    """A row for each number of rows, of active adapters, and way."""
    layers = [make_layer(slots, LINEAR, torch.device("cuda")) for _ in range(MADE)]
    norm, times = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda"), []

    def run(x: Tensor, residual: Tensor, routes: Routes | None, calls: int = CALLS) -> None:
        for call in range(calls):
            x = decoder_layer(x, residual, norm, layers[call % MADE], routes)

    given = {rows: torch.randn(2, rows, HIDDEN, dtype=torch.bfloat16, device="cuda").unbind() for rows in numbers}
    with compiled_side_by_side():
        for rows, (x, residual) in given.items():
            for _, routes in ways(others, torch.zeros(rows, dtype=torch.int64, device="cuda"), slots):
                run(x, residual, routes, calls=1)
    for rows, (x, residual) in given.items():
        plain = graph_microseconds(partial(run, x, residual, None), REPEATS) / CALLS
        times.append(LayerTime(NOTHING, rows, 0, plain))
        for active in sorted({1, min(slots, rows)}):
            chosen = torch.arange(rows, device="cuda") % active
            check(others, chosen, layers[0])
            for way, routes in ways(others, chosen, slots):
                taken = graph_microseconds(partial(run, x, residual, routes), REPEATS) / CALLS
                times.append(LayerTime(way, rows, active, taken))
    set_times({})
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters_cuda", description=__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 16, 64, 256, 2048])
    parser.add_argument("--slots", type=positive, default=8, help="adapters of a layer (default: %(default)s)")
    parser.add_argument(
        "--other", nargs="*", default=["stacked"], help="also by these implementations (default: stacked)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    times = measure(options.rows, options.slots, options.other)
    without = {time.rows: time.layer_us for time in times if time.adapters == NOTHING}
    table = Table("rows", "active adapters", "way", "layer, us", "added, us", "without / with")
    for time in times:
        plain = without[time.rows]
        figures = f"{time.layer_us:.1f}", f"{time.layer_us - plain:.1f}", f"{plain / time.layer_us:.3f}"
        table.add_row(str(time.rows), str(time.active), time.adapters, *figures)
    console = report_console()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a layer without attention")
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(time) for time in times], indent=2) + "\n")


if __name__ == "__main__":
    main()
