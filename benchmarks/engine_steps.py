"""Whole steps of a model with random weights on one device, compared with the limits of its memory and products.

The start of the engine, a decode step for each number of requests, and a prompt step; with `--without-fused-layers` the
same again in an engine whose norms, rotary embedding and gates are torch's operators (vLLM's `custom_ops` of `none`),
and, without `--no-asynchronous`, in one that plans and queues the next step while one runs
(`ucm.scheduler.async_scheduling`); with `--adapters`, also in engines with so many adapters (LoRA), which the requests
take in turn. Each engine is a process of its own. Offline: the model is a configuration, its
weights are random. Steps run in buckets of their own size, as tuning makes them for such traffic; `--max-graphs` takes
the buckets that a server chooses without tuning. The limit of a mixture of experts counts the experts of the measured
steps' rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.engine_shapes import SHAPES, config_of, limit_ms
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.tensor_parallel import BANDWIDTH, DEVICE_KIND
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm_tools.output import report_console, task_progress

# Products of bf16 per second that an H200 reaches in a large product, as two operations each.
PRODUCTS = 790e12
FUSED, TORCH = "fused", "torch"
REPEATS = 12


@dataclass(frozen=True)
class StepTime:
    """Medians of one kind of step, in milliseconds.

    layers: `fused`, or `torch` for its operators. requests: 0 in a prompt step of `tokens` tokens, which is one
    request's; otherwise a decode step of this many requests with `tokens` tokens of context each.
    context: average tokens that each request of the measured decode steps had; 0 in a prompt step.
    wall_ms: of the engine's loop. worker_ms: of the worker in it. device_ms: of the graphs alone, replayed one after
    the other; None without graphs. padded: the bucket that it ran in.
    limit_ms: None on a CPU. launches: of the device, with `--kernels`. ahead: with asynchronous scheduling.
    adapters: of all linear layers and embeddings; 0: the engine takes none.
    experts: of a mixture that the rows of a decode step take, on average of the layers.
    """

    layers: str
    requests: int
    tokens: int
    wall_ms: float
    worker_ms: float
    device_ms: float | None
    padded: str
    context: float = 0.0
    limit_ms: float | None = None
    launches: int | None = None
    ahead: bool = False
    experts: float | None = None
    adapters: int = 0

    @property
    def engine(self) -> str:
        """The name of the engine."""
        name = f"{self.layers}, ahead" if self.ahead else self.layers
        return f"{name}, {self.adapters} adapters" if self.adapters else name

    @property
    def host_ms(self) -> float | None:
        """The part of the engine's time in which the device has no work."""
        return None if self.device_ms is None else self.wall_ms - self.device_ms

    @property
    def name(self) -> str:
        if not self.requests:
            return f"prompt of {self.tokens}"
        return f"decode of {self.requests} at {self.tokens}"

    @property
    def ratio(self) -> float | None:
        """Ratio of the engine's time to the limit."""
        return None if self.limit_ms is None else self.wall_ms / self.limit_ms


def measure(options: argparse.Namespace) -> tuple[list[StepTime], dict[str, Any]]:
    """A row for each kind of step and of engine; and facts about the engines."""
    model = ModelSpec.from_hf_config(config_of(options.shape))
    rows, facts = [], {}
    kinds = [] if options.only_asynchronous else [(FUSED, False)]
    if options.asynchronous or options.only_asynchronous:
        kinds.append((FUSED, True))
    if options.without_fused_layers:
        kinds.append((TORCH, False))
    every = [(*kind, 0) for kind in kinds]
    if options.adapters:
        every += [(FUSED, ahead, options.adapters) for layers, ahead in kinds if layers == FUSED]
    with task_progress("serving") as progress:
        for index, (layers, ahead, adapters) in enumerate(every):
            found = serve(options, layers, ahead, adapters)
            for step in found["steps"]:
                row = StepTime(layers, ahead=ahead, adapters=adapters, **step)
                facts[row.engine] = found["facts"]
                limit = None
                if options.device != "cpu":
                    tokens = row.context if row.requests else row.tokens
                    limit = limit_ms(model, row.requests, tokens, options.bandwidth, options.products, row.experts)
                rows.append(StepTime(**{**asdict(row), "limit_ms": limit}))
            progress((index + 1) / len(every))
    return rows, facts


def serve(options: argparse.Namespace, layers: str, ahead: bool, adapters: int = 0) -> dict[str, Any]:
    """Returns the results of one engine in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "config": config_of(options.shape),
            "requests": options.requests,
            "context": options.context,
            "prompt": options.prompt,
            "dtype": "float32" if options.device == "cpu" else "bfloat16",
            "kv_bytes": (2 << 30) if options.device == "cpu" else 0,
            "max_graphs": options.max_graphs,
            "custom_ops": ["all" if layers == FUSED else "none"],
            "repeats": options.repeats,
            "kernels": options.kernels and layers == FUSED,
            "ahead": ahead,
            "adapters": adapters,
            "rank": options.rank,
            # graphs of a GPU; a CPU computes the same buckets operator by operator
            "mode": "eager" if options.device == "cpu" else "capture",
        }
        env = {
            **os.environ,
            DEVICE_KIND: options.device,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.engine_steps_side", json.dumps(asked), folder]
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found


def table(rows: Sequence[StepTime]) -> Table:
    """One line for each row."""
    found = Table(
        "step",
        "engine",
        "engine, ms",
        "worker, ms",
        "device, ms",
        "engine - device",
        "limit, ms",
        "engine / limit",
        "launches",
    )
    found.columns[0].no_wrap = True
    for row in rows:
        found.add_row(
            row.name,
            row.engine,
            f"{row.wall_ms:.2f}",
            f"{row.worker_ms:.2f}",
            _or_dash(row.device_ms),
            _or_dash(row.host_ms),
            _or_dash(row.limit_ms),
            _or_dash(row.ratio),
            "-" if row.launches is None else str(row.launches),
        )
    return found


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def start_line(engine: str, fact: dict[str, Any]) -> str:
    """Describes how long an engine took to start, by stage. Time outside imports and stages is vLLM's own."""
    return (
        f"start-up, {engine}: {fact['start_seconds']:.1f} s, of them {fact['import_seconds']:.1f} s imports and "
        f"{fact['warm_up_seconds']:.1f} s warm-up of {fact['graphs']} graphs; "
        f"by stage: {', '.join(f'{name} {seconds:.1f}' for name, seconds in fact['stages'].items())}"
    )


def adapter_lines(rows: Sequence[StepTime]) -> list[str]:
    """Compares each kind of step with adapters with the same one without, by steps per second."""
    without = {(row.name, row.layers, row.ahead): row for row in rows if not row.adapters}
    found = []
    for row in rows:
        other = without.get((row.name, row.layers, row.ahead))
        if row.adapters and other is not None:
            ratio = other.wall_ms / row.wall_ms
            found.append(f"{row.name}, {row.engine}: {ratio:.3f} of the steps per second without adapters")
    return found


def report(rows: Sequence[StepTime], facts: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the table, and writes the JSON file if asked for."""
    console = report_console(least_width=120)
    device = next(iter(facts.values()))["device"]
    console.print(f"{device}; {describe_machine()}; {options.shape}")
    console.print(table(rows))
    for row in rows:
        taken = "" if row.experts is None else f", {row.experts:.1f} experts of a layer"
        console.print(f"{row.name}, {row.engine}: bucket {row.padded}{taken}", style="dim")
    for line in adapter_lines(rows):
        console.print(line)
    for engine, fact in facts.items():
        console.print(start_line(engine, fact))
    for engine, fact in facts.items():
        for step, kernels in fact.get("kernels", {}).items():
            console.print(f"\n{step}, {engine}: device time by kernel")
            for name, calls, milliseconds in kernels:
                console.print(f"{milliseconds:9.3f} ms {calls:7.1f} launches  {name[:90]}", markup=False)
    if options.json is not None:
        value = {
            "device": device,
            "machine": describe_machine(),
            "shape": options.shape,
            "steps": [{**asdict(row), "name": row.name, "ratio": row.ratio} for row in rows],
            "facts": facts,
        }
        options.json.write_text(json.dumps(value, indent=2) + "\n")


def _numbers(text: str) -> list[int]:
    return [positive(number) for number in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_steps", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="(default: 8b, and small on a CPU)")
    parser.add_argument("--requests", type=_numbers, default=[1, 16, 64], metavar="N,N", help="(default: 1,16,64)")
    parser.add_argument("--context", type=positive, default=1024, help="tokens of each request (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens of a prompt step (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=REPEATS, help="steps of each kind (default: %(default)s)")
    parser.add_argument(
        "--max-graphs", type=positive, help="number of graphs of a server's own choice, instead of tuned buckets"
    )
    parser.add_argument(
        "--without-fused-layers", action="store_true", help="also measure the layers as torch's operators"
    )
    parser.add_argument(
        "--asynchronous",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure an engine that queues the next step ahead (default: yes)",
    )
    parser.add_argument("--only-asynchronous", action="store_true", help="measure that engine alone")
    parser.add_argument(
        "--kernels", action="store_true", help="list the kernels of each kind of step with fused layers"
    )
    parser.add_argument("--adapters", type=positive, help="also measure engines with so many adapters (LoRA)")
    parser.add_argument("--rank", type=positive, default=16, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second of the device's memory")
    parser.add_argument("--products", type=float, default=PRODUCTS, help="operations per second of its products")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("small" if options.device == "cpu" else "8b")
    report(*measure(options), options)


if __name__ == "__main__":
    main()
