"""Reads logs of requests: public traces of block ids, and logs of tokens or texts. One JSON object a line.

A request is a sequence of units, each one token or one block of the trace. Equal beginnings are equal units.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Encode = Callable[[str], list[int]]
MOST_TOKENS = 1 << 27
"""The longest prompt or answer: longer than any model's context, and short enough to count its blocks."""
_REPORT_LINES = 256


@dataclass(frozen=True)
class LoggedRequest:
    """A request. seconds: its arrival. prompt: units, int64 [units]; the last may be incomplete. answer: the same for
    the answer, None if the log only has its length.
    """

    seconds: float
    prompt: np.ndarray
    prompt_tokens: int
    answer: np.ndarray | None
    answer_tokens: int


@dataclass(frozen=True)
class TrafficLog:
    """Requests in the order of their arrival. kind: the format. unit_tokens: tokens of a unit."""

    kind: Literal["mooncake", "bailian", "tokens", "text"]
    unit_tokens: int
    requests: list[LoggedRequest]


class TrafficLogError(ValueError):
    """Raised for a log that cannot be read; the message names the file, the line, what was found and expected."""


EXPECTED = (
    "a line for each request: hash_ids with input_length and output_length (Mooncake; with chat_id: Qwen Bailian), "
    "prompt_token_ids, or prompt (text)"
)


def read_traffic(
    path: Path,
    unit_tokens: int | None = None,
    encode: Encode | None = None,
    report: Callable[[float], None] = lambda done: None,
) -> TrafficLog:
    """Reads a whole log.

    Args:
        path: the file.
        unit_tokens: tokens of a block of a trace; None: 512 for Mooncake's format, 16 for Bailian's.
        encode: returns the tokens of a text, for a log of texts.
        report: is called with the fraction of the file that was read.

    Raises:
        TrafficLogError: a log of another kind, a broken line, or impossible lengths.
    """
    kind: Any = None
    requests: list[LoggedRequest] = []
    for where, line, done in _lines(path):
        if kind is None:
            kind = _kind(where, line)
            unit = _unit_tokens(where, kind, unit_tokens)
            if kind == "text" and encode is None:
                raise TrafficLogError(f"{where}: found texts; give --tokenizer, the folder of the model's tokenizer")
        if kind in ("mooncake", "bailian"):
            requests.append(_traced(where, line, unit, 1.0 if kind == "bailian" else 1e-3))
        else:
            requests.append(_told(where, line, encode if kind == "text" else None))
        if len(requests) % _REPORT_LINES == 0:
            report(done)
    if kind is None:
        raise TrafficLogError(f"{path}: found no request, expected {EXPECTED}")
    report(1.0)
    requests.sort(key=lambda request: request.seconds)  # stable: equal times keep the order of the file
    return TrafficLog(kind, unit, requests)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Yields each object with its place in words and the fraction of the file that was read."""
    try:
        size = max(1, os.stat(path).st_size)
        with path.open("rb") as file:
            read = 0
            for number, raw in enumerate(file, start=1):
                read += len(raw)
                where = f"{path}, line {number}"
                if not raw.strip():
                    continue
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError) as error:
                    raise TrafficLogError(f"{where}: not JSON ({error}); expected {EXPECTED}") from error
                if not isinstance(line, dict):
                    raise TrafficLogError(f"{where}: found {type(line).__name__}, expected {EXPECTED}")
                yield where, line, min(1.0, read / size)
    except OSError as error:
        raise TrafficLogError(f"{path}: cannot be read: {error.strerror}") from error


def _kind(where: str, line: Mapping[str, Any]) -> str:
    if "hash_ids" in line:
        return "bailian" if "chat_id" in line else "mooncake"
    if "prompt_token_ids" in line:
        return "tokens"
    if "prompt" in line and "schema" not in line:
        return "text"
    if str(line.get("schema", "")).startswith("gaudi-ucm.phase-log"):
        found = "a phase log, which has the sizes of steps and not the content of requests"
    else:
        found = f"the keys {', '.join(sorted(map(str, line))[:8]) or 'of an empty object'}"
    raise TrafficLogError(f"{where}: found {found}; expected {EXPECTED}")


def _unit_tokens(where: str, kind: str, given: int | None) -> int:
    if kind in ("tokens", "text"):
        if given is not None:
            raise TrafficLogError(f"{where}: a log of {kind} has no blocks; leave out --trace-block-tokens")
        return 1
    return given or (16 if kind == "bailian" else 512)


def _traced(where: str, line: Mapping[str, Any], unit: int, second: float) -> LoggedRequest:
    """Returns a request of a trace of block ids. second: the unit of its times."""
    prompt_tokens = _length(where, line, "input_length", least=1)
    answer_tokens = _length(where, line, "output_length", least=0)
    ids = _ids(where, line, "hash_ids")
    blocks = -(-prompt_tokens // unit)
    if len(ids) != blocks:
        raise TrafficLogError(
            f"{where}: found {len(ids)} hash_ids for input_length {prompt_tokens}, expected {blocks} blocks of "
            f"{unit} tokens; --trace-block-tokens sets another size"
        )
    return LoggedRequest(_seconds(where, line) * second, ids, prompt_tokens, None, answer_tokens)


def _told(where: str, line: Mapping[str, Any], encode: Encode | None) -> LoggedRequest:
    """Returns a request of a log of tokens, or of texts if `encode` is given."""
    if encode is None:
        prompt = _ids(where, line, "prompt_token_ids")
        answer = _ids(where, line, "output_token_ids") if line.get("output_token_ids") is not None else None
    else:
        prompt = _encoded(where, line, "prompt", encode)
        answer = _encoded(where, line, "output", encode) if line.get("output") is not None else None
    if not len(prompt):
        raise TrafficLogError(f"{where}: found an empty prompt, expected at least one token")
    if answer is None:
        answer_tokens = _length(where, line, "output_length", least=0) if "output_length" in line else 0
    else:
        answer_tokens = len(answer)
        if line.get("output_length", answer_tokens) != answer_tokens:
            found = f"output_length {line['output_length']!r} with {answer_tokens} tokens of the answer"
            raise TrafficLogError(f"{where}: found {found}, expected the same number")
    return LoggedRequest(_seconds(where, line), prompt, len(prompt), answer, answer_tokens)


def _encoded(where: str, line: Mapping[str, Any], name: str, encode: Encode) -> np.ndarray:
    text = line.get(name)
    if not isinstance(text, str):
        raise TrafficLogError(f"{where}: {name} is {type(text).__name__}, expected text")
    return np.asarray(encode(text), np.int64)


def _ids(where: str, line: Mapping[str, Any], name: str) -> np.ndarray:
    ids = line.get(name)
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 63 for one in ids):
        raise TrafficLogError(f"{where}: {name} is not a list of whole numbers from 0 to {(1 << 63) - 1}")
    return np.asarray(ids, np.int64)


def _length(where: str, line: Mapping[str, Any], name: str, least: int) -> int:
    value = line.get(name)
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise TrafficLogError(f"{where}: {name} is {value!r}, expected {least} to {MOST_TOKENS:,}")
    return value


def _seconds(where: str, line: Mapping[str, Any]) -> float:
    value = line.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise TrafficLogError(f"{where}: timestamp is {value!r}, expected a number of at least 0")
    return float(value)
