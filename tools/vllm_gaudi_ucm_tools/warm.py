"""`gaudi-ucm warm`: starts an engine, warms every bucket, and exits, so that the recipes are on disk before it serves.

With `--processes N` engines warm shares of the buckets at once, each on devices of its own. The first one warms the
first bucket before the others start, so no recipe is compiled twice. A last engine then warms everything from the
folder; the recipes that it still compiles are those that the folder does not keep.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm.envs import hpu_recipe_cache, inductor_cache
from vllm_gaudi_ucm.options.files import read_config_file
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm_tools.observed_engine import ObservedEngine
from vllm_gaudi_ucm_tools.output import report_console, task_progress

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs

POLL_SECONDS = 0.2
PACKAGES = ("vllm-gaudi-ucm", "vllm", "torch", "habana-torch-plugin")
"""Packages whose versions the report has."""


class FolderContent(NamedTuple):
    """Files of a folder and their bytes."""

    files: int
    bytes: int


class WarmResult(NamedTuple):
    """The outcome of an engine. graphs: numbers by state. seconds: of its graphs. compiled: recipes that it compiled,
    on all of its devices. total_seconds: with the start of the engine.
    """

    graphs: dict[str, int]
    seconds: float
    compiled: int
    total_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--recipe-cache", type=Path, metavar="FOLDER", help="where recipes are kept (default: ucm.graphs.recipe_cache)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="engines that warm shares at once (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--verbose", action="store_true", help="show what the engines log, not only their errors")
    # a process of --processes: its share, and a file that says how far it is
    parser.add_argument("--share", nargs=3, metavar=("INDEX", "COUNT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument(
        "engine", nargs=argparse.REMAINDER, metavar="MODEL ...", help="the model and flags of the engine, as a server's"
    )


def run(args: argparse.Namespace) -> int:
    """Fills the folder and prints a report; 1 if a bucket could not be warmed. Raises ValueError for bad options."""
    if not args.engine or args.engine[0].startswith("-"):
        raise ValueError("MODEL: expected a model and then flags of its engine, as `vllm serve` has them")
    if args.processes < 1:
        raise ValueError(f"--processes: found {args.processes}, expected at least 1")
    device = detect_device()
    if device is None:
        raise ValueError("the plugin is not active here; `gaudi-ucm doctor` says why")
    # before vLLM is imported: torch sets inductor's variable itself once it has used the folder
    of_environment = hpu_recipe_cache() if device == "hpu" else inductor_cache()
    engine_args = read_flags(args.engine)
    folder = cache_folder(args.recipe_cache, of_environment, engine_args, device)
    if args.share is not None:
        _warm_share(engine_args, folder, args)
        return 0
    before = content(folder)
    with _alone(folder):
        shares = _run_shares(args, args.processes) if args.processes > 1 else []
        result = _warm_all(engine_args, folder, args)
    after = content(folder)
    found = {
        "folder": str(folder),
        "device": device,
        "versions": versions(),
        "files_before": before.files,
        "files": after.files,
        "bytes": after.bytes,
        **result._asdict(),
        "shares": [share._asdict() for share in shares],
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(result, shares, folder, before, after)
    return 1 if result.graphs.get("failed") else 0


def read_flags(flags: list[str]) -> EngineArgs:
    """Returns the engine's arguments. Raises ValueError for an engine that this command does not warm."""
    from vllm_gaudi_ucm.vllm_api.engine import engine_args_of

    found = engine_args_of(flags)
    if found.data_parallel_size > 1:
        raise ValueError(
            f"--data-parallel-size {found.data_parallel_size}: warming several engines at once is not supported; leave "
            "it out, because engines of one model compile the same, or start the server once if they share out experts"
        )
    return found


def cache_folder(asked: Path | None, of_environment: Path | None, engine_args: EngineArgs, device: str) -> Path:
    """Returns the folder that the engine will use: of the environment, the option, or the configuration."""
    configured = resolve_config(engine_args.additional_config).graphs.recipe_cache
    folder = of_environment or asked or configured
    if folder is None:
        raise ValueError("--recipe-cache: not given, and ucm.graphs.recipe_cache is not set; expected a folder")
    if asked is not None and asked.absolute() != folder.absolute():
        raise ValueError(
            f"--recipe-cache {asked}: an environment variable makes the engine use {folder}; unset "
            f"{'PT_HPU_RECIPE_CACHE_CONFIG' if device == 'hpu' else 'TORCHINDUCTOR_CACHE_DIR'}, or leave the option out"
        )
    return folder.absolute()


def content(folder: Path) -> FolderContent:
    """Returns what a folder holds, with all folders in it; one that does not exist is empty."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return FolderContent(len(sizes), sum(sizes))


def versions() -> dict[str, str]:
    """Returns the versions on which recipes depend, as far as packages have them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second command from filling the same folder. The lock is next to it: the bridge owns what is inside."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.warm.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"--recipe-cache {folder}: another `gaudi-ucm warm` is filling it; wait for that one"
        ) from error
    finally:
        os.close(descriptor)


def _engine(engine_args: EngineArgs, folder: Path, args: argparse.Namespace, graphs: dict[str, Any]) -> WarmEngine:
    return WarmEngine(Path(args.engine[0]), lambda: _changed(engine_args, folder, args.verbose, graphs))


class WarmEngine(ObservedEngine):
    """An engine that only warms its graphs."""

    def call(self, method: str, *values: Any) -> list[Any]:
        """Calls a method of each worker, and returns what they return."""
        found: list[Any] = self._engine.collective_rpc(method, args=values)
        return found

    def figures(self, began: float) -> WarmResult:
        """Returns the figures of all workers. Raises ValueError if the engine has no graphs."""
        workers = self.call("warm_up_figures")
        if not workers[0]:
            raise ValueError("the engine runs at true shapes, so there is nothing to warm: set ucm.graphs.mode")
        states = {name: int(count) for name, count in workers[0].items() if name not in ("seconds", "compiled")}
        compiled = sum(int(one["compiled"]) for one in workers)
        longest = max(float(one["seconds"]) for one in workers)
        return WarmResult(states, round(longest, 3), compiled, round(time.monotonic() - began, 3))


def _warm_all(engine_args: EngineArgs, folder: Path, args: argparse.Namespace) -> WarmResult:
    began = time.monotonic()
    with _engine(engine_args, folder, args, {"warm_up": "full"}) as engine:
        return engine.figures(began)


def _warm_share(engine_args: EngineArgs, folder: Path, args: argparse.Namespace) -> None:
    """Warms the first bucket, says so, and warms the share; the report goes to the file."""
    index, count, file, began = int(args.share[0]), int(args.share[1]), Path(args.share[2]), time.monotonic()
    # an engine whose checks are skipped cannot compile any more
    with _engine(engine_args, folder, args, {"warm_up": "skeleton", "skeleton": 1, "skip_guards": False}) as engine:
        file.with_suffix(".first").touch()
        engine.call("warm_share", index, count)
        file.write_text(json.dumps(engine.figures(began)._asdict()))


def _run_shares(args: argparse.Namespace, count: int) -> list[WarmResult]:
    """Runs the processes, the others once the first one has warmed the first bucket."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running, _progress(args) as report:
        files = [Path(folder) / f"{index}.json" for index in range(count)]
        processes = [running.enter_context(_process(args, 0, count, files[0]))]
        while not files[0].with_suffix(".first").exists():
            _check(processes, files)
            time.sleep(POLL_SECONDS)
        processes += [running.enter_context(_process(args, index, count, files[index])) for index in range(1, count)]
        while any(process.poll() is None for process in processes):
            _check(processes, files)
            report(sum(file.exists() for file in files) / count)
            time.sleep(POLL_SECONDS)
        _check(processes, files)
        return [WarmResult(**json.loads(file.read_text())) for file in files]


@contextmanager
def _process(args: argparse.Namespace, index: int, count: int, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs one process; ends it, should it still run afterwards."""
    command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "warm", "--share", str(index), str(count), str(file)]
    command += ["--recipe-cache", str(args.recipe_cache)] if args.recipe_cache is not None else []
    command += ["--verbose"] if args.verbose else []
    with open(file.with_suffix(".log"), "wb") as log:
        output = None if args.verbose else log
        process = subprocess.Popen([*command, *args.engine], stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _check(processes: list[subprocess.Popen[bytes]], files: list[Path]) -> None:
    """Raises ValueError if a process has failed, with the end of what it wrote."""
    for process, file in zip(processes, files, strict=False):
        if process.poll():
            end = file.with_suffix(".log").read_text(errors="replace").strip()[-2000:]
            raise ValueError(f"--processes: the engine of a share ended with status {process.returncode}: {end}")


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Callable[[float], None]]:
    if args.json:
        yield lambda done: None
        return
    with task_progress("shares") as report:
        yield report


def _changed(engine_args: EngineArgs, folder: Path, verbose: bool, graphs: dict[str, Any]) -> EngineArgs:
    """Returns the engine's arguments with other options of its graphs, and without loading its tokenizer."""
    from dataclasses import replace

    from vllm_gaudi_ucm.vllm_api.engine import LoggingConfig, configure_logging

    logging_config = LoggingConfig(log_level="INFO" if verbose else "ERROR")
    configure_logging(logging_config)
    ours = dict(engine_args.additional_config or {}).get("ucm") or {}
    mapping: Any = read_config_file(Path(ours)) if isinstance(ours, str | Path) else ours
    merged = {**mapping, "graphs": {**(mapping.get("graphs") or {}), **graphs, "recipe_cache": str(folder)}}
    return replace(
        engine_args,
        additional_config={"ucm": merged},
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=verbose,
        logging_config=logging_config,
    )


def _print(
    result: WarmResult, shares: list[WarmResult], folder: Path, before: FolderContent, after: FolderContent
) -> None:
    table = Table(title="warm-up")
    for name in ("engine", "graphs", "failed", "dropped", "recipes compiled", "graphs, s", "with the start, s"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    rows = [(f"share {number} of {len(shares)}", share) for number, share in enumerate(shares, 1)]
    for name, row in [*rows, ("all buckets", result)]:
        counts = [str(row.graphs.get(state, 0)) for state in ("warm", "failed", "dropped")]
        table.add_row(name, *counts, str(row.compiled), f"{row.seconds:.1f}", f"{row.total_seconds:.1f}")
    console = report_console()
    console.print(table)
    added = after.files - before.files
    console.print(f"{folder}: {after.files} files, {show_bytes(after.bytes)}, {added} of them new.", soft_wrap=True)
