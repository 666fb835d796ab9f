"""Chooses how the first product of a layer's adapters is computed, for each number of rows.

Until the ways are measured on this GPU (`measure.py`), a rule decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum

# Numbers of rows whose ways are measured. Other numbers use the next larger one, or the largest.
MEASURED_ROWS = (1, 16, 64, 256, 2048)
# The rule: up to this many rows, a layer's own product is bound by memory, and leaves room for another one.
PARALLEL_ROWS = 256


class Way(StrEnum):
    """The first product after the layer's own one, in parallel with it on a side stream, or joined with it in one
    product for all slots, if the layer's weights are in one tensor.
    """

    IN_TURN = "in turn"
    PARALLEL = "in parallel"
    JOINED = "joined"


Times = Mapping[Way, tuple[float, ...]]
"""Seconds of a layer with adapters, by way and `MEASURED_ROWS`; `JOINED` may be left out."""

# For each of `MEASURED_ROWS` all ways, the fastest first.
_chosen: dict[str, tuple[tuple[Way, ...], ...] | None] = {}


def set_times(times: Times) -> None:
    """Makes measured times known to this process, instead of those it knew; empty leaves everything to the rule."""
    _chosen.clear()
    if times:
        _chosen["ways"] = tuple(
            tuple(sorted(times, key=lambda way: times[way][at])) for at in range(len(MEASURED_ROWS))
        )


def leave_to_rule() -> None:
    """Notes that the ways cannot be measured, so that no other layer tries."""
    _chosen["ways"] = None


def is_measured() -> bool:
    """Returns whether this process has measured the ways, or found that it cannot."""
    return bool(_chosen)


def fastest_way(rows: int, *, joined: bool) -> Way:
    """Returns the way for a step of this many rows. joined: whether the layer's weights are in one tensor."""
    known = _chosen.get("ways")
    if known is None:
        return Way.PARALLEL if rows <= PARALLEL_ROWS else Way.IN_TURN
    ways = known[min(bisect_left(MEASURED_ROWS, rows), len(known) - 1)]
    return next(way for way in ways if joined or way is not Way.JOINED)
