"""The values that vllm-gaudi's strategies take along one dimension of a bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from vllm_gaudi_ucm_tools.vllm_gaudi.settings import SettingsError

# Values beyond which a set can neither be compiled nor be listed in reasonable time.
MOST_VALUES = 200_000


def exponential(low: int, step: int, high: int, count: int, ends_at_high: bool) -> list[int]:
    """Returns up to `count` values that grow by a constant factor, as multiples of `step`, up to `high`.

    A `low` of 0 or 1 is a value in addition, and the growth begins at `step`. ends_at_high: whether the last value is
    `high` itself before it is rounded, as with contiguous reading.
    """
    if count <= 1:
        return [high]
    start = step if low in (0, 1) else low
    values = {low} if low in (0, 1) else set()
    for place in range(count):
        # these floats decide about rounding at multiples of `step`, so their order of operations matters
        exact = start * np.float_power(high / start, (1.0 / float(count - 1)) * place)
        last = place == count - 1
        values.add(high if last and ends_at_high else math.ceil(exact / step) * step)
    found = sorted(values)
    return [*found[:-1], min(found[-1], high)]


def linear(low: int, step: int, high: int) -> list[int]:
    """Returns `low` doubled up to `step`, then all multiples of `step` up to `high`, which need not be one."""
    _check("linear", low, step, high)
    if low == high == 0:
        return [0]
    start = low or step
    doubled = takewhile(lambda value: value < step and value <= high, (start << power for power in range(64)))
    multiples = range(step, high + 1, step)
    values = {*doubled, *(value for value in multiples if value >= start)}
    return sorted(values | {0} if low == 0 else values)


def padding_aware(low: int, step: int, high: int, most: int, percent: int) -> list[int]:
    """Returns values of which each pads the sizes before it by at most `most` and `percent` %, and `high`.

    The values double up to `step`. Of the multiples after it one is kept if the next one would pad too much, or if it
    is a multiple of `most` (0: of `high`).
    """
    _check("pad", low, step, high)
    if not 0 <= percent <= 50:
        raise SettingsError(f"PAD_PERCENT is {percent}, expected 0 to 50, as vllm-gaudi does")
    most = most or high
    values = [low]
    for size in _walk(values, low, step, high):
        padded = size + step - values[-1] - 1
        too_much = padded / (size + step) > percent / 100.0 or padded > most
        if (too_much or size % most == 0) and size != values[-1]:
            values.append(size)
    return sorted(set(values) | {high})


def _walk(values: list[int], low: int, step: int, high: int) -> Iterator[int]:
    """Appends the doubled values to `values`, then yields the sizes after them, one step apart."""
    size = low
    while size <= min(step, high):
        size = 2 * values[-1] or 1
        if size <= high:
            values.append(size)
    while size <= high:
        yield size
        size += step


def _check(strategy: str, low: int, step: int, high: int) -> None:
    if step < 1:
        raise SettingsError(f"strategy {strategy}: the step of a range is {step}, expected at least 1")
    if low > high:
        raise SettingsError(
            f"strategy {strategy}: a range goes from {low} to {high}; vllm-gaudi ends at start with such a range; "
            "lower its _MIN or raise its _MAX"
        )
    if (high - low) // step > MOST_VALUES:
        raise SettingsError(f"strategy {strategy}: a range from {low} to {high} in steps of {step} has too many values")
