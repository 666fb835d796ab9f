"""Reads logs of requests: results of `vllm bench serve`, traces with a line for each request, tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.numbers import seconds, whole
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Request, TrafficError

# Names of a request's fields: vLLM's timed traces and Mooncake, OpenAI's usage, Azure's traces, BurstGPT.
PROMPT = ("input_length", "prompt_tokens", "input_tokens", "ContextTokens", "Request tokens")
OUTPUT = ("output_length", "completion_tokens", "output_tokens", "GeneratedTokens", "Response tokens")
TIME = ("timestamp", "time", "arrival", "TIMESTAMP", "Timestamp", "created")
# Tokens that an id in `hash_ids` stands for, and seconds of a unit of time in the same trace: Mooncake, Alibaba's Qwen.
HASHED = {512: 1e-3, 16: 1.0}
TIME_UNITS = {"s": 1.0, "ms": 1e-3}


def is_request(row: Any) -> bool:
    """Returns whether a row of a log has the lengths of a request."""
    return isinstance(row, dict) and any(name in row for name in PROMPT) and any(name in row for name in OUTPUT)


def from_bench(result: Mapping[str, Any], source: str) -> tuple[list[Request], tuple[str, ...]]:
    """Returns the requests of a result of `vllm bench serve`, and what was left out."""
    inputs, outputs = result.get("input_lens"), result.get("output_lens")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise TrafficError(
            f"{source}: is a result of vllm bench serve without the lengths of its requests; run it with --save-result "
            "--save-detailed"
        )
    times = result.get("start_times") or [0.0] * len(inputs)
    if not isinstance(times, list) or not len(inputs) == len(outputs) == len(times):
        raise TrafficError(
            f"{source}: has {len(inputs)} input_lens, {len(outputs)} output_lens; expected as many of each, "
            "and of start_times"
        )
    rows, failed = [], 0
    for number, (prompt, output, time) in enumerate(zip(inputs, outputs, times, strict=True), 1):
        place = f"{source}: request {number}"
        if whole(output, f"{place}, output_lens") == 0:
            failed += 1
            continue
        rows.append(Request(seconds(time, f"{place}, start_times"), whole(prompt, f"{place}, input_lens"), int(output)))
    notes = (f"{counted(failed, 'request')} without output left out",) if failed else ()
    return from_first(rows, source), notes


def from_lines(lines: Iterable[str], source: str, time_unit: str | None = None) -> list[Request]:
    """Returns the requests of a trace with a JSON object on each line. time_unit: of `TIME_UNITS`; None: seconds, or
    the one that its hashes tell.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrafficError(f"{source}, line {number}: malformed JSON") from error
        if isinstance(row, dict) and isinstance(row.get("usage"), dict):
            row = {**row, **row["usage"]}
        rows.append(_request(row, f"{source}, line {number}"))
    return from_first(_in_seconds(rows, time_unit), source)


def from_table(text: str, source: str, time_unit: str | None = None) -> list[Request]:
    """Returns the requests of a table in CSV, whose first line names the columns. time_unit: as in `from_lines`."""
    reader = csv.DictReader(io.StringIO(text))
    try:
        rows = [_request(row, f"{source}, line {number}") for number, row in enumerate(reader, 2)]
    except csv.Error as error:
        raise TrafficError(f"{source}: malformed CSV: {error}") from error
    return from_first(_in_seconds(rows, time_unit), source)


def _request(row: Any, place: str) -> Request:
    if not is_request(row):
        raise TrafficError(
            f"{place}: has no lengths of a request; expected one of {', '.join(PROMPT)}, and one of {', '.join(OUTPUT)}"
        )
    name, prompt = _first(row, PROMPT)
    prompt_tokens = whole(prompt, f"{place}, {name}")
    name, output = _first(row, OUTPUT)
    output_tokens = whole(output, f"{place}, {name}")
    time = next((row[key] for key in TIME if row.get(key) not in (None, "")), 0.0)
    arrival = _date(time, place) if isinstance(time, str) else seconds(time, f"{place}, time")
    hashes = row.get("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(part, int) for part in hashes):
        return Request(arrival, prompt_tokens, output_tokens)
    return Request(arrival, prompt_tokens, output_tokens, tuple(hashes))


def _in_seconds(rows: Sequence[Request], time_unit: str | None) -> list[Request]:
    """Returns requests with arrivals in seconds, and with one size for all hashed parts, or without hashes."""
    hashed = [row for row in rows if row.hashes]
    # a short prompt has one part with either size, so that all of them decide
    fits = [size for size in HASHED if hashed and all(len(row.hashes) == -(-row.prompt // size) for row in hashed)]
    unit = max(fits, default=0)
    scale = HASHED.get(unit, 1.0) if time_unit is None else TIME_UNITS[time_unit]
    return [
        row._replace(arrival=scale * row.arrival, hashes=row.hashes if unit else (), unit=unit if row.hashes else 0)
        for row in rows
    ]


def _first(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    return next((name, row[name]) for name in names if name in row)


def _date(text: str, place: str) -> float:
    """Returns the seconds of a number or of a date in ISO format; digits after microseconds are cut."""
    readers: tuple[Callable[[str], float], ...] = (float, lambda value: datetime.fromisoformat(_cut(value)).timestamp())
    for read in readers:
        try:
            return seconds(read(text), f"{place}, time")
        except (ValueError, OverflowError):
            continue
    raise TrafficError(f"{place}: the time is {text[:60]!r}, expected a number of seconds or a date in ISO format")


def _cut(text: str) -> str:
    """Returns a date without the digits after microseconds."""
    head, dot, tail = text.strip().partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    return head + dot + tail[:digits][:6].ljust(6, "0") * bool(dot) + tail[digits:]


def from_first(rows: Sequence[Request], source: str) -> list[Request]:
    """Returns requests whose times count from the first one, in the order of their arrival."""
    if not rows:
        raise TrafficError(f"{source}: holds no requests")
    first = min(row.arrival for row in rows)
    return sorted((row._replace(arrival=row.arrival - first) for row in rows), key=lambda row: row.arrival)
