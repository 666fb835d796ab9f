"""Numbers of logs, checked one by one."""

from __future__ import annotations

import math
from typing import Any

from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import TrafficError

MOST_TOKENS = 2**31 - 1


def whole(value: Any, what: str, least: int = 0) -> int:
    """Returns a whole number, also of a float or a text that is one. Raises TrafficError that says what it is of."""
    try:
        number = float(value)
        if isinstance(value, bool) or not number.is_integer() or not least <= number <= MOST_TOKENS:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise TrafficError(f"{what} is {_short(value)}, expected a whole number of at least {least}") from None
    return int(number)


def seconds(value: Any, what: str) -> float:
    """Returns a time. Raises TrafficError that says what it is of."""
    try:
        number = float(value)
        if isinstance(value, bool) or not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise TrafficError(f"{what} is {_short(value)}, expected a time as a number") from None
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
