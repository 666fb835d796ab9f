"""Output of commands: the console of their reports, and files, whose place is checked before the work and which are
filled as a whole or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_gaudi_ucm.printable import print_look_alikes

# width of lines in a file or a pipe, which need not fit: wider than any table
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


# columns that are read with ease: prose is broken there on wider terminals
PROSE_WIDTH = 100


def prose_console() -> Console:
    """Returns the console for lists with sentences: as wide as the terminal, up to `PROSE_WIDTH`; 80 without one."""
    print_look_alikes()
    console = Console(markup=False, highlight=False)
    console.width = min(console.width, PROSE_WIDTH)
    return console


def check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raises ValueError that names the option if `path` (None: nothing to check) cannot be written.

    suffixes: allowed endings of the name, in lower case; () allows all.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} {path}: expected a name that ends in {', '.join(suffixes)}")
    if why_not := why_not_writable(path):
        raise ValueError(f"{option} {path}: {why_not}; expected a file name in a folder that exists and is writable")


def why_not_writable(path: Path) -> str:
    """Returns why no file can be written at a path; "" if one can, as far as the system tells without trying."""
    folder = path.parent
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return f"{folder} is a file"
        if path.is_dir():
            return "is a folder"
        if not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} may not be written by this user"
        if path.exists() and not os.access(path, os.W_OK):
            return "may not be written by this user"
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return f"the folder {folder} does not exist" if missing else f"{error.strerror or error}"
    return ""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to: it becomes `path` at the end, and is removed if the block is interrupted.

    It has the suffix of `path`. A path that is not a file, such as /dev/stdout, is written directly.
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
    """Shows a bar while the block runs; the block calls the yielded function with the fraction of the work that is
    done.
    """
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
