"""Expands a plan into the (row, request, position) triples that it computes, through its public fields only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.batch.batches import Step
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.window import Window

Pair = tuple[int, int, int]


def expand(plan: UnifiedPlan, step: Step) -> Counter[Pair]:
    """How often the plan computes each (row, request, position)."""
    return Counter([*causal_pairs(plan), *shared_pairs(plan, step), *unique_pairs(plan, step)])


def expected(plan: UnifiedPlan, step: Step, window: Window | None = None) -> Counter[Pair]:
    """The oracle: a row sees every position of its own request up to its own, once, that a window leaves."""
    pairs: Counter[Pair] = Counter()
    for row, (request, position) in enumerate(owners(plan, step)):
        first = 0
        if window is not None:
            first = position - position % window.tokens if window.chunked else position - window.tokens + 1
        pairs.update((row, request, seen) for seen in range(max(first, 0), position + 1))
    return pairs


def owners(plan: UnifiedPlan, step: Step) -> list[tuple[int, int]]:
    """(request, position) of every row, from the order of requests alone."""
    flat = [int(index) for index in plan.requests]
    requests = step.requests
    return [(i, requests[i].computed + offset) for i in flat for offset in range(requests[i].new)]


def causal_pairs(plan: UnifiedPlan) -> Iterator[Pair]:
    if plan.causal is None:
        return
    groups = plan.causal.groups.tolist()
    for query_lo, query_hi, key_lo, key_hi in plan.causal.slices:
        for query in range(query_lo, query_hi):
            first = 0 if plan.causal.first_rows is None else int(plan.causal.first_rows[query])
            for key in range(max(key_lo, first), min(key_hi, query + 1)):
                if groups[query] == groups[key] >= 0:
                    yield query, _request(plan, key), int(plan.positions[key])


def shared_pairs(plan: UnifiedPlan, step: Step) -> Iterator[Pair]:
    if plan.shared is None:
        return
    for rows, block_lo, block_hi in plan.shared.groups:
        for row in rows.tolist():
            for index in range(block_lo, block_hi):
                span = plan.row_requests[row]
                lo, hi = int(plan.shared.lo[span, index]), int(plan.shared.hi[span, index])
                if plan.shared.rise is not None:
                    lo = max(0, lo + int(plan.shared.rise[row]))
                yield from _cached(plan, step, row, int(plan.shared.blocks[index]), range(lo, max(lo, hi)))


def unique_pairs(plan: UnifiedPlan, step: Step) -> Iterator[Pair]:
    if plan.unique is None:
        return
    for block, row, lo, hi in zip(*(array.tolist() for array in plan.unique[:4]), strict=True):
        assert 0 <= row < plan.num_single
        yield from _cached(plan, step, row, block, range(lo, hi))


def _cached(plan: UnifiedPlan, step: Step, row: int, block: int, tokens: range) -> Iterator[Pair]:
    """Maps (block, offset) back through the block table of the row's own request; a foreign block raises."""
    request = _request(plan, row)
    assert 0 <= tokens.start <= tokens.stop
    assert not tokens or tokens.stop <= step.block_size
    for offset in tokens:
        yield row, request, step.position(request, block, offset)


def _request(plan: UnifiedPlan, row: int) -> int:
    return int(plan.requests[plan.row_requests[row]])
