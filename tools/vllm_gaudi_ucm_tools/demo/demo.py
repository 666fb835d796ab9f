"""`gaudi-ucm demo`: runs a mixed load through the real engine, and shows the phases of its steps."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.demo.engine import Answer, check_model, check_workers, serve, start_engine
from vllm_gaudi_ucm_tools.demo.load import DemoRequest, build_load
from vllm_gaudi_ucm_tools.demo.report import DemoResult, show_result
from vllm_gaudi_ucm_tools.output import check_output
from vllm_gaudi_ucm_tools.phases.phases import PICTURES, write_plot


class DemoProgress:
    """A bar on stderr; its length follows the tokens, so that it moves while long answers are written."""

    def __init__(self, requests: int) -> None:
        text = "{task.fields[done]}/{task.total} requests  {task.fields[tokens]:,} tokens, {task.fields[rate]:.0f}/s"
        self._progress = Progress(
            TextColumn("serving"), BarColumn(), TextColumn(text), TimeElapsedColumn(), console=Console(stderr=True)
        )
        self._task = self._progress.add_task("", total=requests, done=0, requests=requests, tokens=0, rate=0.0)
        self._start = time.perf_counter()

    def show(self, answers: Sequence[Answer]) -> None:
        """Show the state of all requests."""
        tokens = sum(answer.output_tokens for answer in answers)
        self._progress.update(
            self._task,
            completed=sum(answer.progress for answer in answers),
            done=sum(answer.finished for answer in answers),
            tokens=tokens,
            rate=tokens / max(time.perf_counter() - self._start, 1e-9),
        )

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


DEFAULT_REQUESTS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder of a model (Hugging Face format)"
    )
    parser.add_argument(
        "--requests", type=int, default=DEFAULT_REQUESTS, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the load and the samples (default: %(default)s)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="workers that share the model, each on a device of its own (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the phases (.png, .svg or .pdf)")
    parser.add_argument("--phase-log", type=Path, metavar="FILE", help="keep the phase log, for `gaudi-ucm phases`")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs, not only its errors")


def run(args: argparse.Namespace) -> int:
    """Run the command; a model or an option that does not fit raises ValueError."""
    check_output("--plot", args.plot, PICTURES)
    check_output("--phase-log", args.phase_log)
    check_model(args.model)
    check_workers(args.model, args.tensor_parallel_size)
    load = build_load(args.requests, args.seed)
    with tempfile.TemporaryDirectory(prefix="gaudi-ucm-demo-") as scratch:
        log = args.phase_log or Path(scratch) / "phases.jsonl"
        result = asyncio.run(_measure(args, load, log.absolute()))
        header, records = read_phase_log(log)
    result = replace(result, header=header, records=records)
    if args.plot is not None:
        write_plot(records, args.plot, header)
    if args.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        show_result(result, args.plot)
    return 0


async def _measure(args: argparse.Namespace, load: Sequence[DemoRequest], log: Path) -> DemoResult:
    """Starts the engine, serves the load, stops the engine; progress goes to stderr."""
    print(f"loading {args.model} ...", file=sys.stderr)
    start = time.perf_counter()
    level = "INFO" if args.verbose else "ERROR"
    engine = start_engine(args.model, log, args.seed, level, args.tensor_parallel_size)
    try:
        ready = time.perf_counter()
        with DemoProgress(len(load)) as progress:
            answers: list[Answer] = await serve(engine, load, progress.show)
        return DemoResult(answers, start_up_s=ready - start, seconds=time.perf_counter() - ready)
    finally:
        engine.shutdown()
        # vLLM keeps an exception whose traceback holds this frame; an engine that lives until the interpreter ends
        # prints a traceback from its finaliser.
        del engine
