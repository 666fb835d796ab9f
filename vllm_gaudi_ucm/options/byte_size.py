"""Sizes in options: bytes as an integer, or text such as 4GiB."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: Any) -> Any:
    """Text such as `4GiB` or `500 MB` in bytes; anything else as it is. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    match = _TEXT.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"found {value!r}, expected bytes, or text such as 4GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(count: float) -> str:
    """`1.5 GiB`: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


ByteSize = Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)]
"""The type of an option; its `expected` needs the note `BYTES_NOTE`."""
BYTES_NOTE = "bytes, or text such as 4GiB"
