"""Sparse against dense decode attention of one layer on CPU, selection included: ratios of interleaved medians.

Every call reads another layer's cache, as a model does: in one cache the few blocks of a sparse step would stay in the
CPU's caches from call to call. A budget counts all blocks that are attended, the first and the last one included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.sparse_attention_workload import Model, Workload
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

MODELS = Model(9, 3, 64), Model(32, 8, 128)  # SmolLM2-135M and a common 8B model
COLUMNS = ("30 %", "10 %", "10 % locked", "verify/sparse", "verify/locked", "max error")


def measure(workload: Workload, repeats: int) -> dict[str, float]:
    """Median milliseconds per contender, interleaved, and the error of sparse attention to every block."""
    contenders = workload.contenders()
    layers = cycle(range(workload.layers))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            layer, inputs = next(layers), contender.fresh()
            start = time.perf_counter()
            out = contender.run(layer, inputs)
            spent = time.perf_counter() - start
            assert torch.isfinite(out).all()
            if repeat:  # the first round allocates
                times[name].append(spent * 1e3)
    return {f"{name}_ms": statistics.median(values) for name, values in times.items()} | {"error": workload.error()}


def ratios(figures: dict[str, float]) -> list[float]:
    """Returns how many times faster than dense, and how much longer a verification takes than a sparse decode."""
    times = {name.removesuffix("_ms"): value for name, value in figures.items()}
    faster = [times["dense"] / times[name] for name in ("sparse_30", "sparse_10", "locked_10")]
    return [*faster, *(times["verify_10"] / times[name] for name in ("sparse_10", "locked_10"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--operations", action="store_true", help="choose with several operations, not in one call")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(describe_machine() + f", {torch.get_num_threads()} threads")
    if native() is None:
        print(f"no native implementation: {why_not_native()}")
    print(f"{'heads/kv/dim':<13}{'requests':>9}{'context':>9}{'dense ms':>10}" + "".join(f"{c:>15}" for c in COLUMNS))
    rows = []
    for model in MODELS:
        for requests in options.requests:
            for context in options.contexts:
                figures = measure(Workload(model, requests, context, not options.operations), options.repeats)
                rows.append({"model": str(model), "requests": requests, "context": context, **figures})
                print(
                    f"{model!s:<13}{requests:>9}{context:>9}{figures['dense_ms']:>10.2f}"
                    + "".join(f"{ratio:>14.2f}x" for ratio in ratios(figures))
                    + f"{figures['error']:>15.1e}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
