"""A first and a second start of an engine with a model of random weights, by stage.

The first has no compiled kernels on disk (`TRITON_CACHE_DIR` is an empty folder), the second has those of the first.
Each is a process of its own and warms all of its graphs. Offline: the model is a configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.engine_shapes import SHAPES, config_of
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.tensor_parallel import DEVICE_KIND
from vllm_gaudi_ucm_tools.output import report_console

GOAL = 30.0  # seconds of a first start, 48 graphs of an 8B shape on an H200


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request to one engine, see `engine_steps_side.start`."""
    config = {**config_of(options.shape)}
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    on_cpu = options.device == "cpu"
    return {
        "config": config,
        "requests": [options.requests],
        "context": options.context,
        "prompt": options.prompt,
        "repeats": 1,
        "dtype": "float32" if on_cpu else "bfloat16",
        "kv_bytes": (1 << 30) if on_cpu else 0,
        "max_graphs": options.max_graphs,
        "custom_ops": ["all"],
        "ahead": not on_cpu,
        "mode": "eager" if on_cpu else "capture",
    }


def serve(options: argparse.Namespace, kernels: Path) -> dict[str, Any]:
    """The facts of one start. kernels: the folder of compiled ones."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            DEVICE_KIND: options.device,
            "TRITON_CACHE_DIR": str(kernels),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.engine_start_side", json.dumps(asked_of(options)), folder]
        begin = time.perf_counter()
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        facts: dict[str, Any] = json.loads((Path(folder) / "facts.json").read_text())
        return {**facts, "process_seconds": time.perf_counter() - begin}


def table(starts: Sequence[dict[str, Any]]) -> Table:
    """Returns a column for each start; time outside imports and stages of the worker is vLLM's own."""
    names = ("first start", "second start", *(f"start {number}" for number in range(3, len(starts) + 1)))
    found = Table("seconds", *names[: len(starts)])
    stages = dict.fromkeys(name for fact in starts for name in fact["stages"])
    rows = [("imports", [fact["import_seconds"] for fact in starts])]
    rows += [(name, [fact["stages"].get(name, 0.0) for fact in starts]) for name in stages]
    known = [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows), strict=True)]
    rows.append(("other", [fact["start_seconds"] - part for fact, part in zip(starts, known, strict=True)]))
    rows.append(("all", [fact["start_seconds"] for fact in starts]))
    for name, numbers in rows:
        found.add_row(name, *(f"{number:.1f}" for number in numbers))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Starts, and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_start", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="(default: 8b, and small on a CPU)")
    parser.add_argument("--layers", type=positive, help="of the model (default: as the shape has)")
    parser.add_argument("--requests", type=positive, default=64, help="of a step (default: %(default)s)")
    parser.add_argument("--context", type=positive, default=1024, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--max-graphs", type=positive, default=48, help="graphs (default: %(default)s)")
    parser.add_argument("--starts", type=positive, default=2, help="one after the other (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("small" if options.device == "cpu" else "8b")
    with tempfile.TemporaryDirectory() as kernels:
        starts = [serve(options, Path(kernels)) for _ in range(options.starts)]
    console = report_console(least_width=120)
    console.print(f"{starts[0]['device']}; {describe_machine()}; {options.shape}, {starts[0]['graphs']} graphs")
    console.print(table(starts))
    console.print(f"goal of a first start on an H200: {GOAL:.0f} s", style="dim")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": describe_machine(), "starts": starts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
