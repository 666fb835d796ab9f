"""The ways to compute a product, and which is fastest for each number of rows.

Without measured times (`measured_ways.py`) a rule decides by the work of each way. One row is bound by reading the
weight. For two rows or more, the matrix unit needs the fewest instructions, unless it has to split the weight first,
which pays off from 65 rows. Larger products are bound by arithmetic: oneDNN orders it best for bfloat16, and does
without the matrix unit for fp32. Plain weights are multiplied only where times say that this is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import combinations_with_replacement, pairwise
from math import inf, prod
from typing import NamedTuple

# Numbers of rows whose products are measured. Other numbers use the next larger one; above all of them the rule
# decides.
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Up to this many rows, a step is a graph if all of its products are native calls, which saves the host's work for each
# call.
NATIVE_ROWS = 64
# How much faster oneDNN has to be to outweigh a graph, and a native product of more rows, where oneDNN's lead grows.
WORTH_A_GRAPH, WORTH_MANY_ROWS = 1.4, 1.1
# The most by which a slower way counts as slower, so that a few disturbed measurements cannot outvote the others.
MOST_LOSS = 1.5


class Way(StrEnum):
    """Says how a product is computed: by native kernels with vectors or on the matrix unit, by oneDNN, or by torch from
    a weight that is not packed.

    Members are in the order of the number of rows that they suit: few, some, many.
    """

    VECTORS = "vectors"
    TILES = "matrix unit"
    ONEDNN = "oneDNN"
    PLAIN = "torch"


IN_GRAPHS = (Way.VECTORS, Way.TILES)
"""Ways whose products are native calls, which a graph can hold."""


class Kind(StrEnum):
    """How a weight is stored: bfloat16 in pairs, fp32, or in fewer bits."""

    PAIRS = "bfloat16"
    FLOAT32 = "float32"
    BFLOAT16 = "float32 kept in bfloat16"
    FLOAT16 = "float32 kept in float16"
    AFFINE4 = "float32 kept in 4 bits"
    SYMMETRIC8 = "float32 kept in 8 bits"


# Native kernels and oneDNN read the same number of bytes of these kinds. Of others oneDNN reads more: with few rows
# that limits the speed, and times of a single weight that stays in a cache do not show it.
SAME_BYTES = (Kind.PAIRS, Kind.FLOAT32)


class Times(NamedTuple):
    """Seconds of one kind's products, by way and `MEASURED_ROWS`; empty if they are not known."""

    kind: Kind
    seconds: Mapping[Way, tuple[float, ...]]

    def fastest(self, rows: int, ways: Collection[Way]) -> Way:
        """Returns the fastest way for this many rows, one of `ways`."""
        if rows == 0 or not any(way in ways for way in IN_GRAPHS):
            return next(iter(ways))
        chosen = None if any(way not in self.seconds for way in ways) else self._chosen(ways)
        if chosen is not None and rows <= MEASURED_ROWS[-1]:
            return chosen[bisect_left(MEASURED_ROWS, rows)]
        if chosen is not None and chosen[-1] is Way.PLAIN:
            # what keeps it ahead of the others, a better order of the arithmetic, counts more with more rows
            return Way.PLAIN
        return self._by_rule(rows, [way for way in ways if way is not Way.PLAIN])

    def _chosen(self, ways: Collection[Way]) -> tuple[Way, ...]:
        """The way for each of `MEASURED_ROWS`: a larger number of rows never takes an earlier member of `Way`.

        Among all such choices, it takes the one that loses least against the best way of each number of rows. So one
        disturbed measurement does not decide: choosing oneDNN for one row by mistake would keep every decode out of
        graphs.
        """
        in_order = [way for way in Way if way in ways]
        columns = [{way: self._time(way, column, ways) for way in in_order} for column in range(len(MEASURED_ROWS))]
        losses = [{way: min(time / min(times.values()), MOST_LOSS) for way, time in times.items()} for times in columns]

        def loss(chosen: Sequence[Way]) -> float:
            return prod(lost[way] for lost, way in zip(losses, chosen, strict=True))

        return min(combinations_with_replacement(in_order, len(MEASURED_ROWS)), key=loss)

    def _time(self, way: Way, column: int, ways: Collection[Way]) -> float:
        """Seconds of a way at one of `MEASURED_ROWS`, plus the other costs of choosing this way."""
        seconds = self.seconds[way][column]
        if MEASURED_ROWS[column] > NATIVE_ROWS:
            return seconds * (WORTH_MANY_ROWS if way in IN_GRAPHS else 1.0)
        if way in IN_GRAPHS:
            return seconds
        # at so few rows, a graph saves what the unit loses to oneDNN
        return seconds * WORTH_A_GRAPH if self.kind in SAME_BYTES and Way.TILES not in ways else inf

    def needs_onednn(self, ways: Collection[Way]) -> bool:
        """True if a weight needs a copy for oneDNN: native products of many rows are slower by more than a tenth."""
        if any(way not in self.seconds for way in ways):
            return True
        native = min(self.seconds[way][-1] for way in ways if way in IN_GRAPHS)
        return native > WORTH_MANY_ROWS * self.seconds[Way.ONEDNN][-1]

    def _by_rule(self, rows: int, ways: Collection[Way]) -> Way:
        few, many_by_onednn = rows <= NATIVE_ROWS, Way.ONEDNN in ways
        splits_for_few = few and self.kind is Kind.FLOAT32
        bound_by_arithmetic = not few and self.kind is Kind.PAIRS and many_by_onednn
        if Way.TILES in ways and rows > 1 and not splits_for_few and not bound_by_arithmetic:
            return Way.TILES
        return Way.VECTORS if few or not many_by_onednn else Way.ONEDNN

    def described(self, ways: Collection[Way]) -> str:
        """Describes in words which way multiplies up to how many rows."""
        steps = [(self.fastest(rows, ways), rows) for rows in (*MEASURED_ROWS, MEASURED_ROWS[-1] + 1)]
        changes = [(way, rows) for (way, rows), (then, _) in pairwise(steps) if way is not then]
        named = [f"{way} up to {rows} row{'s' * (rows > 1)}" for way, rows in changes]
        return ", ".join((*named, f"{steps[-1][0]} beyond")) if named else f"{steps[-1][0]} for any number of rows"


_known: dict[Kind, Times] = {}


def times_of(kind: Kind) -> Times:
    """Returns the known times of a kind."""
    return _known.get(kind, Times(kind, {}))


def set_times(times: Mapping[Kind, Mapping[Way, tuple[float, ...]]]) -> None:
    """Makes measured times known to this process, instead of those it knew; empty leaves everything to the rule."""
    _known.clear()
    _known.update({kind: Times(kind, seconds) for kind, seconds in times.items()})
    fastest_way.cache_clear()


@cache
def ways(tiles: bool, onednn: bool, plain: bool = False) -> tuple[Way, ...]:
    """Returns the ways in which a weight may be multiplied. tiles: the matrix unit is in use. onednn: the weight has a
    copy for oneDNN. plain: it is kept as it was loaded, too.
    """
    there = {Way.VECTORS: True, Way.TILES: tiles, Way.ONEDNN: onednn, Way.PLAIN: plain}
    return tuple(way for way, is_there in there.items() if is_there)


@cache
def fastest_way(kind: Kind, rows: int, given: tuple[Way, ...]) -> Way:
    """Returns the way for this many rows of a kind; larger numbers than measured may be the largest plus one."""
    return times_of(kind).fastest(rows, given)
