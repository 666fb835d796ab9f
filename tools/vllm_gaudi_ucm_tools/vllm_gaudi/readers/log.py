"""A log of traffic of any kind that can be read: finds out which kind it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm_tools.vllm_gaudi.readers import phase_steps, profiler
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.description import from_description, is_description
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.request_log import (
    OUTPUT,
    PROMPT,
    from_bench,
    from_lines,
    from_table,
    is_request,
)
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Request, TrafficError

MOST_BYTES = 1 << 30
KINDS = (
    "a result of vllm bench serve (--save-detailed), a trace with a JSON object or a line of CSV for each request, a "
    "profiler's JSON of vllm-gaudi, a phase log of gaudi-ucm, or a description of traffic"
)
BENCH = ("request_throughput", "input_lens", "num_prompts", "total_input_tokens")


@dataclass(frozen=True)
class Log:
    """A log of one kind. text: of a profiler's log. requests: of a log of requests. phases: whether it is a phase log.

    known: limits of the server that it names. notes: what was left out.
    """

    path: Path
    text: str = ""
    requests: tuple[Request, ...] = ()
    phases: bool = False
    known: dict[str, int] | None = None
    notes: tuple[str, ...] = ()


def open_log(path: Path, time_unit: str | None = None) -> Log:
    """Returns the log. time_unit: of the arrivals in a log of requests.

    Raises:
        TrafficError: it is of no known kind, or malformed.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise TrafficError(f"{path}: has {size >> 20} MiB, expected at most {MOST_BYTES >> 20}; cut it to a busy hour")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrafficError(f"{path}: is no text in UTF-8; expected {KINDS}") from error
    start = text.lstrip()[:1]
    if not start:
        raise TrafficError(f"{path}: is empty; expected {KINDS}")
    if start == "[":
        return _of_array(path, text, time_unit)
    if start == "{":
        return _of_objects(path, text, time_unit)
    return _of_table(path, text, time_unit)


def _of_array(path: Path, text: str, time_unit: str | None) -> Log:
    first = next(iter(profiler.events(text, str(path))), {})
    if "conversations" in first:
        raise TrafficError(
            f"{path}: holds texts of conversations, not their tokens; replay it with vllm bench serve "
            "--dataset-name sharegpt --save-result --save-detailed, and give that result"
        )
    if is_request(first):
        rows = [json.dumps(event) for event in profiler.events(text, str(path))]
        return Log(path, requests=tuple(from_lines(rows, str(path), time_unit)))
    if "ph" not in first:
        raise TrafficError(f"{path}: is an array of other objects; expected {KINDS}")
    return Log(path, text, known=profiler.known_limits(profiler.counters(text, str(path))))


def _of_objects(path: Path, text: str, time_unit: str | None) -> Log:
    first = _object(text.lstrip().partition("\n")[0])
    if first is not None and (is_request(first) or isinstance(first.get("usage"), dict)):
        return Log(path, requests=tuple(from_lines(text.splitlines(), str(path), time_unit)))
    if first is not None and str(first.get("schema", "")).startswith("gaudi-ucm.phase-log"):
        return Log(path, phases=True, known=phase_steps.known_limits(path))
    whole = _object(text)
    if whole is not None and "traceEvents" in whole:
        raise TrafficError(
            f"{path}: is a trace of torch's profiler (VLLM_PROFILER_ENABLED=full), which has no counters of steps; use "
            "VLLM_PROFILER_ENABLED=true, or give a log of requests"
        )
    if is_description(whole):
        assert whole is not None
        return Log(path, requests=tuple(from_description(whole, str(path))))
    if whole is not None and any(name in whole for name in BENCH):
        requests, notes = from_bench(whole, str(path))
        return Log(path, requests=tuple(requests), notes=notes)
    raise TrafficError(f"{path}: is JSON of another kind; expected {KINDS}")


def _of_table(path: Path, text: str, time_unit: str | None) -> Log:
    head = text.lstrip().partition("\n")[0]
    columns = [name.strip().strip('"') for name in head.split(",")]
    if any(name in columns for name in PROMPT) and any(name in columns for name in OUTPUT):
        return Log(path, requests=tuple(from_table(text, str(path), time_unit)))
    if "INFO" in text[:20_000] or "WARNING" in text[:20_000]:
        raise TrafficError(
            f"{path}: is a server's log as text, which has neither the lengths of requests nor the sizes of steps; "
            f"expected {KINDS}"
        )
    raise TrafficError(f"{path}: its first line is {head[:60]!r}; expected {KINDS}")


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
