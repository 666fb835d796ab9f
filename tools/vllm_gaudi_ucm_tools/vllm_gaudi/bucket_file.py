"""Files for `VLLM_BUCKETING_FROM_FILE`: what vllm-gaudi's parser makes of them, and files that it cannot trip over."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, product
from pathlib import Path

from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings, SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Shape, prepare_from_file

RANGE = re.compile(r"range\(\s*(-?\d+)\s*,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?\)")
MOST_IN_RANGE = 10_000
MOST_BYTES = 4 << 20
MOST_ENTRIES = 1_000_000


def parse_bucket_file(path: Path) -> list[Shape]:
    """Returns the entries of a file, as vllm-gaudi reads them.

    Raises:
        SettingsError: a line at which the server ends its start, or a file that is too large for a list of buckets.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SettingsError(f"{path}: has {size} bytes, expected a list of buckets of at most {MOST_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is no text in UTF-8, expected a list of buckets") from error
    entries: list[Shape] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            entries += _entries(line, f"{path}, line {number}")
        if len(entries) > MOST_ENTRIES:
            raise SettingsError(f"{path}, line {number}: more than {MOST_ENTRIES} entries up to here")
    return entries


def _entries(line: str, place: str) -> list[Shape]:
    ends = "vllm-gaudi ends at start with such a line"
    try:
        entry = ast.literal_eval(RANGE.sub(_listed, line))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise SettingsError(f"{place}: {line!r} is no literal such as (1, 128, [0, 4]); {ends}") from error
    if not isinstance(entry, tuple) or len(entry) != 3:
        raise SettingsError(f"{place}: {line!r} is not of the form (batch, query, blocks); {ends}")
    lists = [value if isinstance(value, list) else [value] for value in entry]
    if len(lists[0]) * len(lists[1]) * len(lists[2]) > MOST_ENTRIES:
        raise SettingsError(f"{place}: has more than {MOST_ENTRIES} entries")
    try:
        return [(int(x), int(y), int(z)) for x, y, z in product(*lists)]
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingsError(f"{place}: {line!r} has a value that is no number; {ends}") from error


def _listed(match: re.Match[str]) -> str:
    """Returns a range as a list, whose end is excluded; one that is too long or has no step stays, and is invalid."""
    first, end, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step == 0 or len(range(first, end, step)) > MOST_IN_RANGE:
        return match[0]
    return repr(list(range(first, end, step)))


def write_bucket_file(path: Path, shapes: Iterable[Shape], settings: Settings, notes: Sequence[str]) -> None:
    """Writes a file of these buckets, and reads it back as the server does.

    notes: lines of its head. Raises SettingsError if the server would make other buckets of it, which is a defect.
    """
    wanted = sorted(set(shapes))
    lines = [f"# {_printable(note)}" for note in notes]
    for (batch, query), group in groupby(wanted, key=lambda shape: shape[:2]):
        lines.append(f"({batch}, {query}, {[context for _, _, context in group]})")
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    prepared = prepare_from_file(parse_bucket_file(path), settings)
    made = {*prepared.prompts, *prepared.seeds}
    if prepared.omitted or made != set(wanted):
        raise SettingsError(
            f"{path}: vllm-gaudi would leave out or change {counted(len(made ^ set(wanted)), 'bucket')} of this file"
        )


def _printable(note: str) -> str:
    return " ".join(note.encode("ascii", "replace").decode().split())
