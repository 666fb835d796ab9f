"""Compares the fused kernels of a decoder layer on a GPU with vLLM's forward by torch's operators, and with the bytes
that move.

Sizes of an 8B shape: rows of 4096, 32 query and 8 KV heads of 128, gates of 14336, bfloat16; every kernel in a CUDA
graph of 20 calls, which write what the next reads, as in a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.tensor_parallel import BANDWIDTH
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import cuda_rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cuda.rotary import cuda_rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate
from vllm_gaudi_ucm_tools.output import report_console

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4096, 32, 8, 128, 14336
CALLS, REPEATS = 20, 15
EPSILON = 1e-5


@dataclass(frozen=True)
class KernelTime:
    """Medians of one call in microseconds: of ours, and of torch's operators. limit_us: bytes over the bandwidth."""

    kernel: str
    rows: int
    ours_us: float
    torch_us: float
    limit_us: float


def torch_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Computes the norm like vLLM's own forward."""
    wide, total = x.float(), None
    if residual is not None:
        wide = wide + residual.float()
        total = wide.to(x.dtype)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return normal.to(weight.dtype) * weight, total


def torch_rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates x [rows, heads * HEAD] like vLLM's own forward."""
    heads = x.view(x.shape[0], -1, HEAD)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(x.shape)


Call = Callable[[], object]


def kernels(rows: int, device: str = "cuda") -> Iterator[tuple[str, Call, Call, int]]:
    """(name, ours, torch's, bytes that one call reads and writes)."""
    options = {"dtype": torch.bfloat16, "device": device}
    x, residual = torch.randn(2, rows, HIDDEN, **options).unbind()
    weight, of_head = torch.ones(HIDDEN, **options), torch.ones(HEAD, **options)
    row = rows * HIDDEN * 2
    yield "norm", lambda: cuda_rms_norm(x, weight, EPSILON), lambda: torch_norm(x, weight), 2 * row
    yield (
        "norm with residual",
        lambda: cuda_rms_norm(x, weight, EPSILON, residual, in_place=True),
        lambda: torch_norm(x, weight, residual),
        4 * row,
    )
    joined = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD, **options)
    query, key, _ = joined.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
    heads = query.unflatten(-1, (HEADS, HEAD))
    yield "norm of heads", lambda: cuda_rms_norm(heads, of_head, EPSILON), lambda: torch_norm(heads, of_head), 2 * row
    angles = torch.randn(rows, HEAD // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(torch.bfloat16)
    positions = torch.arange(rows, device=device)

    def by_torch() -> None:
        found = table.index_select(0, positions)
        torch_rotate(query, found)
        torch_rotate(key, found)

    for name, is_neox in (("rotary, halves", True), ("rotary, neighbours", False)):
        turned = 2 * rows * (HEADS + KV_HEADS) * HEAD * 2

        def ours(is_neox: bool = is_neox) -> None:
            cuda_rotate(query, key, positions, table, HEAD, is_neox)

        yield name, ours, by_torch, turned
    gates = torch.randn(rows, 2 * INNER, **options)

    def gate_by_torch() -> Tensor:
        return torch.nn.functional.silu(gates[:, :INNER]) * gates[:, INNER:]

    yield "gate", lambda: cuda_gate(gates), gate_by_torch, 3 * rows * INNER * 2


def microseconds(call: Call) -> float:
    """Returns the microseconds of one of CALLS in a graph."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return graph_microseconds(run, REPEATS) / CALLS


def graph_microseconds(run: Callable[[], object], repeats: int) -> float:
    """Returns the median microseconds of replays of a graph with all that `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


@torch.inference_mode()
def measure(numbers: Sequence[int], bandwidth: float) -> list[KernelTime]:
    """A row for each kernel and number of rows."""
    return [
        KernelTime(name, rows, microseconds(ours), microseconds(theirs), 1e6 * moved / bandwidth)
        for rows in numbers
        for name, ours, theirs, moved in kernels(rows)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers_cuda", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 2048, 8192])
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second of the device's memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    times = measure(options.rows, options.bandwidth)
    table = Table("kernel", "rows", "ours, us", "limit, us", "torch, us", "ratio")
    for time in times:
        figures = (time.ours_us, time.limit_us, time.torch_us, time.torch_us / time.ours_us)
        table.add_row(time.kernel, str(time.rows), *(f"{figure:.1f}" for figure in figures))
    console = report_console()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; up to 50 MB stay in the second cache")
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(time) for time in times], indent=2) + "\n")


if __name__ == "__main__":
    main()
