"""Journals, which grow while a run measures, and files of records for readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.budget import Budget
from benchmarks.quality.measure import DENSE, Key, Method, Record

FIGURES = ("score", "nats", "same", "read")
DIGITS = 4


class Journal:
    """A file of records, one JSON object a line. A run that was stopped goes on after the last whole sample.

    Args:
        path: is made with its folder if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records = list(read_records([path])) if path.exists() else []

    def missing(self, key: Key, methods: Sequence[Method], budgets: Sequence[Budget]) -> list[Method]:
        """Returns the methods without a record of this sample at some budget; all of them without a dense record."""
        done = {(record.method, record.ratio) for record in self.records if record.key == key}
        if (DENSE, 1.0) not in done:
            return list(methods)
        return [one for one in methods if any((one.name, budget.ratio) not in done for budget in budgets)]

    def has_dense(self, key: Key) -> bool:
        return any(record.key == key and record.method == DENSE for record in self.records)

    def add(self, records: Iterable[Record]) -> None:
        """Appends a sample's records in one write."""
        made = list(records)
        # a line that was cut off must not take the next one with it
        cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + "".join(json.dumps(asdict(record)) + "\n" for record in made))
        self.records += made


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yields the records of journals and of files by `save_records`, each once: the last one counts. A line that was
    cut off is skipped.
    """
    found: dict[tuple[Key, str, float], Record] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            for record in _of_line(fields):
                found[record.key, record.method, record.ratio] = record
    yield from found.values()


def _of_line(fields: dict[str, Any]) -> Iterator[Record]:
    if "key" not in fields:
        return  # the first line of a file for readers
    key = Key(**fields.pop("key"))
    if "methods" not in fields:
        yield Record(key, **fields)
        return
    for method, by_ratio in fields["methods"].items():
        for ratio, figures in by_ratio.items():
            yield Record(key, method, float(ratio), *figures)


def save_records(path: Path, records: Sequence[Record], versions: dict[str, str]) -> None:
    """Writes a file for readers: versions, then for each sample a line of rounded figures by method and ratio."""
    samples: dict[Key, dict[str, dict[float, list[float]]]] = {}
    for one in records:
        figures = [round(getattr(one, name), DIGITS) for name in FIGURES]
        samples.setdefault(one.key, {}).setdefault(one.method, {})[one.ratio] = figures
    lines = [json.dumps({"versions": versions, "figures": FIGURES})]
    lines += [json.dumps({"key": asdict(key), "methods": methods}) for key, methods in samples.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
