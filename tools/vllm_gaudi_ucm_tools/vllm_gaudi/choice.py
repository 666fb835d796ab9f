"""The bucket set that costs a traffic the least under a limit of graphs, and covers every step that can come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_gaudi_ucm_tools.vllm_gaudi.demand import Points, Sizes, points_of
from vllm_gaudi_ucm_tools.vllm_gaudi.level_search import Curve, Demand, Floats, Ints, search
from vllm_gaudi_ucm_tools.vllm_gaudi.look_up import BATCH_STEP, fallback_value
from vllm_gaudi_ucm_tools.vllm_gaudi.replay import Outcome, replay
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings, SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.shape_cost import ShapeCost
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared, Shape, prepare_from_file
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Traffic

# Queries are multiples of this many tokens; up to a block, of a quarter of a block.
LEAST_QUERY = 16


@dataclass(frozen=True)
class Choice:
    """entries: of the bucket file. prepared: what the server makes of them. outcome: the traffic in these buckets."""

    entries: tuple[Shape, ...]
    prepared: Prepared
    outcome: Outcome


class Table:
    """The demand of one kind of bucket: single prompts, merged prompts, or decodes.

    Args:
        demand: what the search gets.
        entry: makes an entry of a file of its two sizes.
    """

    def __init__(self, demand: Demand, entry: Callable[[int, int], Shape]) -> None:
        self.demand, self.entry = demand, entry

    @property
    def least(self) -> int:
        return len(self.demand.must | {self.demand.ends[-1]})


def choose(
    traffic: Traffic,
    settings: Settings,
    cost: ShapeCost,
    most: int,
    report: Callable[[float], None] = lambda done: None,
    *,
    margin: float = 0.0,
) -> Choice:
    """Returns the best set of at most `most` graphs. margin: share of the weight that goes to larger steps.

    Raises:
        SettingsError: `most` is less than a set needs that covers everything.
    """
    tables = make_tables(points_of(traffic, settings).with_larger(margin, settings), settings, cost)
    least = sum(table.least for table in tables)
    budget, curves = most, _curves(tables, most, report)
    while True:
        if budget < least:
            raise SettingsError(
                f"--max-graphs is {most}, expected at least {_with_drafts(tables, settings)} to cover every step "
                "of this server"
            )
        entries = tuple(sorted(_joined(_best_entries(tables, curves, budget), settings)))
        prepared = prepare_from_file(entries, settings)
        if prepared.num_graphs <= most:
            break
        # the server adds buckets for drafts to the file's, and ranks form shapes together
        budget = min(budget - 1, budget * most // prepared.num_graphs)
    return Choice(entries, prepared, replay(traffic.steps, prepared, settings))


def _curves(tables: list[Table], most: int, report: Callable[[float], None]) -> list[Curve]:
    found: list[Curve] = []

    def of_all(done: float) -> None:
        report((len(found) + done) / len(tables))

    for table in tables:
        found.append(search(table.demand, most, of_all))
    return found


def _joined(entries: set[Shape], settings: Settings) -> set[Shape]:
    """Returns the entries, with several ranks also the shapes of single prompts that their padded sizes form together.

    Decodes need no others: their blocks are looked up for the batch of all ranks.
    """
    if settings.ranks == 1:
        return entries
    singles = {shape for shape in entries if shape[0] == 1 and shape[1] != 1}
    return entries | {(1, max(a[1], b[1]), max(a[2], b[2])) for a in singles for b in singles}


def _with_drafts(tables: list[Table], settings: Settings) -> int:
    """Returns the graphs of the smallest set that covers everything."""
    entries = {
        table.entry(first, table.demand.top(first))
        for table in tables
        for first in table.demand.must | {table.demand.ends[-1]}
    }
    return prepare_from_file(entries, settings).num_graphs


def most_blocks(settings: Settings) -> int:
    """Returns the most blocks that decodes can have; shared ones count for each request, but at most three times, as
    the server's own strategy assumes.
    """
    if settings.contiguous:
        return settings.num_blocks
    own = settings.blocks_per_request * settings.max_num_seqs
    if settings.hybrid_chunk:
        return own
    return min(own, settings.num_blocks * (3 if settings.prefix_caching else 1))


def make_tables(points: Points, settings: Settings, cost: ShapeCost) -> list[Table]:
    """Returns the tables of single prompts, merged prompts (if they may merge), and decodes."""
    tables = [_single(points.singles, settings, cost), _decodes(points.decodes, settings, cost)]
    if settings.prefill_batch > 1 and not settings.hybrid_chunk:
        merged = _merged(points.merged, settings, cost)
        return tables if merged is None else [*tables, merged]
    return tables


def _single(points: Sizes, settings: Settings, cost: ShapeCost) -> Table:
    def seconds(query: Floats, context: Floats) -> Floats:
        return cost.prefill(1, query, query, context)

    def entry(query: int, context: int) -> Shape:
        # a long query without context that is no multiple of a slice would be left out
        slices = settings.slices
        sliced = slices is not None and query >= slices[0] and query % slices[1] != 0
        return 1, query, max(context, 1) if sliced else context

    ends = query_ends(settings)
    demand = Demand(*_columns(points), ends, frozenset(), lambda query: settings.most_context, seconds)
    return Table(demand, entry)


def query_ends(settings: Settings) -> list[int]:
    """Returns the queries that buckets may have, up to the longest one."""
    most = min(settings.max_num_batched_tokens, settings.max_model_len)
    block = settings.hybrid_chunk or settings.block_size
    small = settings.hybrid_chunk or max(LEAST_QUERY, block // 4)
    ends = {*range(small, min(block, most), small), *range(block, most, block), most}
    if (slices := settings.slices) is not None:
        # without a context, queries from a length on must be multiples of a slice
        largest = max((end for end in ends if end % slices[1] == 0), default=0)
        ends = {end for end in ends if end < slices[0] or end % slices[1] == 0 or end == most > largest}
    return sorted(ends)


def merged_batches(settings: Settings) -> list[int]:
    """Returns the batches of merged prompts that a set must have, so that no merge adds a bucket that runs."""
    most = settings.prefill_batch
    return sorted({min(fallback_value(count, BATCH_STEP), most) for count in range(2, most + 1)})


def _merged(points: Sizes, settings: Settings, cost: ShapeCost) -> Table | None:
    tokens = settings.max_num_batched_tokens
    batches = [batch for batch in merged_batches(settings) if tokens // batch > 1]
    if not batches:
        return None

    def seconds(batch: Floats, query: Floats) -> Floats:
        return cost.prefill(batch, batch * query, query, 0)

    must = frozenset(batches)
    ends = sorted({*must, *range(2, batches[-1] + 1)})

    def top(batch: int) -> int:
        query = min(tokens // batch, settings.max_model_len)
        slices = settings.slices
        return query if slices is None or query < slices[0] else query - query % slices[1]

    demand = Demand(*_columns(points), ends, must, top, seconds)
    return Table(demand, lambda batch, query: (batch, max(query, 2), 0))


def _decodes(points: Sizes, settings: Settings, cost: ShapeCost) -> Table:
    tokens, most = settings.decode_tokens, most_blocks(settings)

    def top(batch: int) -> int:
        own = batch * settings.blocks_per_request
        return most if settings.contiguous else max(batch, min(own, most))

    def seconds(batch: Floats, blocks: Floats) -> Floats:
        least = blocks if settings.contiguous else np.maximum(blocks, batch)
        return cost.decode(batch * tokens, least if settings.contiguous else least * tokens)

    demand = Demand(*_columns(points), range(1, settings.max_num_seqs + 1), frozenset(), top, seconds)

    def entry(batch: int, blocks: int) -> Shape:
        return batch, 1, max(blocks, 1 if settings.contiguous else batch)

    return Table(demand, entry)


def _columns(points: Sizes) -> tuple[Ints, Ints, Floats]:
    sizes = np.array(sorted(points), np.int64).reshape(-1, 2)
    return sizes[:, 0], sizes[:, 1], np.array([points[first, second] for first, second in sorted(points)], np.float64)


def _best_entries(tables: list[Table], curves: list[Curve], budget: int) -> set[Shape]:
    """Splits the budget among the tables so that all together cost the least."""
    total, splits = np.zeros(1), []
    for curve in curves:
        sums = np.full(budget + 1, np.inf)
        split = np.zeros(budget + 1, np.int64)
        for own in np.flatnonzero(np.isfinite(curve.seconds[: budget + 1])):
            others = total[: budget + 1 - own] + curve.seconds[own]
            here = slice(own, own + len(others))
            better = others < sums[here]
            sums[here][better], split[here][better] = others[better], own
        total = sums
        splits.append(split)
    number, entries = int(np.argmin(total)), set()
    for table, curve, split in reversed(list(zip(tables, curves, splits, strict=True))):
        own = int(split[number])
        entries |= {table.entry(first, second) for first, second in curve.levels(own)}
        number -= own
    return entries
