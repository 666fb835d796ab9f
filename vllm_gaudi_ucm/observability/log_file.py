"""The file of a phase log: lines are appended, its size is bounded, and files of runs before are kept."""

from pathlib import Path
from typing import TextIO

GENERATIONS = 5
"""Files that are kept in addition to the newest one."""
LONGEST_HEADER = 1 << 20
"""Bytes; a file that is no log may be one line."""
HEADER_START = b'{"schema":"gaudi-ucm.phase-log/'


class LogFile:
    """Opens a new file, whose first line is the header, and keeps earlier files.

    Args:
        header: first line of each file.
        most_bytes: length at which a new file begins; None: there is no bound.
        generations: number of files to keep, of this run and earlier ones. The oldest is removed first.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, header: str, most_bytes: int | None = None, generations: int = GENERATIONS) -> None:
        self._path = path
        self._header = header
        self._most_bytes = most_bytes
        self._generations = generations
        self._size = 0
        self._file = self._begin()

    def write(self, line: str) -> None:
        """Appends a line in ASCII. Raises OSError."""
        self._file.write(line)
        self._size += len(line)
        if self._most_bytes is not None and self._size >= self._most_bytes:
            self._file.close()
            self._file = self._begin()

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> TextIO:
        keep_previous(self._path, self._generations)
        # Line buffering hands each step to the operating system whole: a kill costs at most the last line.
        file = self._path.open("w", encoding="utf-8", buffering=1)
        file.write(self._header)
        self._size = len(self._header)
        return file


def keep_previous(path: Path, generations: int = GENERATIONS) -> None:
    """Renames a log that holds steps to `NAME.previous`, that one to `NAME.previous.2`, and so on. Raises OSError.

    A start that failed leaves a header alone, which displaces nothing.
    """
    if not path.is_file() or _holds_no_step(path):
        return
    names = [path, *(_generation(path, number) for number in range(1, generations + 1))]
    # if one is missing, the older ones stay
    free = next((number for number, name in enumerate(names) if number and not name.exists()), generations)
    for number in range(free, 0, -1):
        names[number - 1].replace(names[number])


def of_engine(path: Path, engine: int) -> Path:
    """The path for one of several engines of a server: the first one to `path`, the others to `NAME.1.jsonl` ..."""
    return path if engine == 0 else path.with_name(f"{path.stem}.{engine}{path.suffix}")


def _generation(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.previous" + (f".{number}" if number > 1 else ""))


def _holds_no_step(path: Path) -> bool:
    """True for an empty file, and for a header without a whole line behind it. Other files may be anything."""
    with path.open("rb") as file:
        first = file.readline(LONGEST_HEADER)
        return not first or (first.startswith(HEADER_START) and not file.readline().endswith(b"\n"))
