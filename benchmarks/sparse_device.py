"""Sparse against dense decode attention of one layer on a device with graphs, selection included.

Each contender is captured as a CUDA graph, as a bucket is, and replayed in turn with the others; figures are medians
of device time. Both sides are the implementation that serves on that device. Keys and values in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.sparse_attention import ratios
from benchmarks.sparse_attention_workload import BLOCK_SIZE, Contender, Model, Workload

MODEL = Model(32, 8, 128)
SIZES = ((1, 32768), (8, 32768), (1, 131072), (4, 131072))
COLUMNS = ("30 %", "10 %", "10 % locked", "verify/sparse", "verify/locked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no CUDA device; benchmarks.sparse_attention measures on a CPU")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {MODEL}, block {BLOCK_SIZE}")
    print(f"{'requests':>9}{'context':>9}{'dense ms':>10}{'of bytes':>10}" + "".join(f"{c:>15}" for c in COLUMNS))
    rows = []
    for requests, context in SIZES:
        workload = Workload(MODEL, requests, context, one_call=False)
        figures = measure(workload, options.repeats)
        rows.append({"requests": requests, "context": context, **figures})
        kv_bytes = requests * context * MODEL.kv_heads * 2 * MODEL.dim * 2
        bound = kv_bytes / copy_bandwidth() * 1e3
        print(
            f"{requests:>9}{context:>9}{figures['dense_ms']:>10.3f}{bound / figures['dense_ms']:>9.0%} "
            + "".join(f"{ratio:>14.2f}x" for ratio in ratios(figures))
            + f"   error {figures['error']:.1e}",
            flush=True,
        )
        del workload
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")


def measure(workload: Workload, repeats: int) -> dict[str, float]:
    """Median milliseconds of each contender, replayed in turn, and the error of a choice of every block."""
    contenders = workload.contenders()
    replays = {name: capture(contender) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, replay in replays.items():
            times[name].append(milliseconds(replay))
    return {f"{name}_ms": statistics.median(values) for name, values in times.items()} | {"error": workload.error()}


def capture(contender: Contender) -> Callable[[], None]:
    """The contender over the first layer as a graph."""
    inputs = contender.fresh()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        contender.run(0, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = contender.run(0, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()

    def replay(kept: tuple[object, ...] = (inputs, out, contender)) -> None:
        """Returns a replay; the graph keeps its own tensors alive."""
        graph.replay()

    return replay


def milliseconds(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_bandwidth() -> float:
    """Bytes per second that a plain copy reads and writes."""
    source = torch.zeros(1 << 30, dtype=torch.int8)
    target = torch.empty_like(source)
    spent = min(milliseconds(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.numel() / (spent * 1e-3)


if __name__ == "__main__":
    main()
