"""Output of commands: the console of their reports, and files, whose place is checked before the work and which are
filled as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_gaudi_ucm.cli.output import why_not_writable
from vllm_gaudi_ucm.printable import print_look_alikes

# of lines in a file or a pipe, where nothing has to fit: wider than any table
FULL_WIDTH = 10_000


def report_console(file: TextIO | None = None, least_width: int = 0) -> Console:
    """Returns the console for tables and text of a report: as wide as the terminal, and of full width elsewhere.

    file: where it prints; stdout if None. least_width: columns of a table that a narrower terminal should wrap, because
    it would be cut otherwise.
    """
    print_look_alikes()
    console = Console(file=file, highlight=False)
    console.width = max(console.width, least_width) if console.is_terminal else FULL_WIDTH
    return console


def check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """ValueError that names the option where `path` (None: nothing to check) cannot be written.

    suffixes: allowed endings of the name, in lower case; () allows all.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} {path}: expected a name that ends in {', '.join(suffixes)}")
    if why_not := why_not_writable(path):
        raise ValueError(f"{option} {path}: {why_not}; expected a file name in a folder that exists and is writable")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The path to write to instead: it becomes `path` at the end, and is removed where the block is interrupted.

    It has the suffix of `path`. What is no file, as /dev/stdout, is written as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def task_progress(what: str) -> Iterator[Callable[[float], None]]:
    """Shows a bar while the block runs; the block calls what it is given with the fraction that is done."""
    columns = (
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda done: progress.update(task, completed=done)
