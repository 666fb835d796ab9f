"""Whole jobs, prompts and decodes, of a model with random weights: dense, with sparse decodes, with sparse prompts.

`python -m benchmarks.sparse_jobs --device cuda`. All engines are started first, then take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.engine_side import EngineSide
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.sparse_engine import SHAPES, random_model, served, size
from vllm_gaudi_ucm_tools.output import report_console

WORKER = Path(__file__).with_name("sparse_jobs_worker.py")
DENSE = "dense"


@dataclass(frozen=True)
class JobTime:
    """Median seconds of a job, and until the last of its requests has a token."""

    engine: str
    requests: int
    context: int
    seconds: float
    first_token_seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), options)
        sides = {name: side(name, ucm, model, options) for name, ucm in engines(options).items()}
        try:
            with ThreadPoolExecutor() as pool:
                for started in track([pool.submit(one.start) for one in sides.values()], description="starting"):
                    started.result()
            times = measure(sides, options)
        finally:
            for one in sides.values():
                one.stop()
    show(times, options)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(time) for time in times], indent=2) + "\n")


def engines(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the configuration of each engine, by name."""
    decodes = {"sparse_ratio": options.ratio}
    prompts = decodes | {"prompt_ratio": options.ratio, "prompt_tile": options.tile}

    def gsa(given: dict[str, Any]) -> dict[str, Any]:
        own = given | ({"sparse_steps": "always"} if options.always else {})
        return {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": own}}

    found = {DENSE: {}, f"prompts and decodes {options.ratio:.0%}": gsa(prompts)}
    return found | ({f"decodes {options.ratio:.0%}": gsa(decodes)} if options.decodes else {})


def side(name: str, ucm: dict[str, Any], model: Path, options: argparse.Namespace) -> EngineSide:
    """Returns an engine whose KV cache has room for the largest job."""
    arguments, environment = served(model, options, ucm, chunk=options.chunk, new=options.new)
    arguments["load_format"] = "dummy"
    return EngineSide(name.replace(" ", "-"), Path(sys.executable), arguments, environment, WORKER, timeout_s=600)


def measure(sides: Mapping[str, EngineSide], options: argparse.Namespace) -> list[JobTime]:
    """Returns a time for each size and engine, the median of the repeats after one that compiles kernels."""
    times, runs = [], options.repeats + 1
    for requests, context in options.sizes:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in track(range(runs), description=f"{requests} x {context}"):
            order = {"requests": requests, "context": context, "new_tokens": options.new, "seed": number}
            for name, one in sides.items():
                found[name].append(one.ask(order))
        for name, answers in found.items():
            medians = [
                statistics.median(answer[key] for answer in answers[1:]) for key in ("seconds", "first_token_seconds")
            ]
            times.append(JobTime(name, requests, context, *medians))
    return times


def show(times: Sequence[JobTime], options: argparse.Namespace) -> None:
    """Prints a table of the times, with ratios to the dense engine."""
    dense = {(time.requests, time.context): time for time in times if time.engine == DENSE}
    table = Table("job", "engine", "job, s", "dense / it", "last first token, s", "dense / it")
    for time in times:
        base = dense[time.requests, time.context]
        ratios = base.seconds / time.seconds, base.first_token_seconds / time.first_token_seconds
        figures = f"{time.seconds:.2f}", f"{ratios[0]:.2f}", f"{time.first_token_seconds:.2f}", f"{ratios[1]:.2f}"
        table.add_row(f"{time.requests} x {time.context} + {options.new}", time.engine, *figures)
    console = report_console(least_width=100)
    console.print(f"{describe_machine()}; {options.shape}, chunks of {options.chunk}, tiles of {options.tile}")
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_jobs", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="of random weights (default: 8b on a GPU, small on a CPU)")
    parser.add_argument("--layers", type=positive, help="layers, in place of the shape's")
    parser.add_argument("--sizes", type=size, nargs="+", help="jobs, such as 8x32768")
    parser.add_argument("--new", type=positive, default=192, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--chunk", type=positive, default=8192, help="rows of a step (default: %(default)s)")
    parser.add_argument("--tile", type=positive, default=256, help="rows that choose together (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.2, help="blocks that are attended (default: %(default)s)")
    parser.add_argument("--decodes", action="store_true", help="also measure an engine whose prompts are dense")
    parser.add_argument("--always", action="store_true", help="sparse even if it does not pay")
    parser.add_argument("--repeats", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--max-graphs", type=positive, default=24, help="of each engine (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("8b" if options.device == "cuda" else "small")
    options.sizes = options.sizes or [size("8x32768" if options.device == "cuda" else "1x8192")]
    return options


if __name__ == "__main__":
    main()
