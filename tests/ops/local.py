"""A flat batch as layers with a window, chunks, sinks, slopes or a soft cap see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import PerHead

WHOLE = 1 << 30


@dataclass(frozen=True)
class Features:
    """window: tokens, 0 for none; chunked: they are chunks. cap: soft cap, 0 for none."""

    window: int = 0
    chunked: bool = False
    cap: float = 0.0
    sinks: bool = False
    slopes: bool = False

    def first_seen(self, position: int) -> int:
        """The first position that the row at this one sees."""
        if not self.window:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)


def features(slopes: bool = False) -> st.SearchStrategy[Features]:
    """Windows of 1, below, at and above a block of 4 tokens, and beyond any context."""
    windows = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 17, 64])
    caps = st.sampled_from([0.0, 0.5, 2.0, 30.0])
    local = st.builds(Features, windows, st.booleans(), caps, st.booleans())
    return local | st.builds(Features, st.just(0), st.just(False), caps, st.booleans(), st.just(slopes))


def with_features(plain: Batch, wanted: Features, block_size: int) -> Batch:
    """The batch for a layer with these features: from the definition, and what no row sees is poison."""
    spec = replace(
        plain.spec,
        logits_soft_cap=wanted.cap or None,
        is_local=bool(wanted.window),
        has_sinks=wanted.sinks,
        has_slopes=wanted.slopes,
    )
    heads = plain.query.shape[1]
    random = torch.Generator().manual_seed(3)
    per_head = PerHead(
        torch.randn(heads, generator=random) * 3 if wanted.sinks else None,
        torch.rand(heads, generator=random) if wanted.slopes else None,
    )
    batch = replace(plain, spec=spec, per_head=per_head)
    if wanted.window or wanted.slopes:
        batch.parts, batch.seen = _parts(plain, wanted, block_size), list(plain.seen)
    if wanted.window:
        _hide(batch, plain, wanted, block_size)
    return batch


def says_how_long(batch: Batch) -> Batch:
    """The batch with what the planner says of windows: the most blocks of a request, and of a single row."""
    shared, unique = batch.parts.shared, batch.parts.unique
    if shared is not None and shared.rise is not None:
        used = shared.hi > shared.lo.clamp(min=0)
        shared = shared._replace(most_of_span=int(used.sum(1).max()))
    if unique is not None and unique.rows.numel():
        unique = unique._replace(most_of_row=int(torch.bincount(unique.rows).max()))
    return replace(batch, parts=batch.parts._replace(shared=shared, unique=unique))


def _rows(batch: Batch) -> list[tuple[int, int]]:
    """(request, position) of each row that is no pad."""
    return [(i, r.cached + row) for i, r in enumerate(batch.requests) for row in range(r.new)]


def _parts(plain: Batch, wanted: Features, block_size: int) -> AttentionParts:
    rows, total = _rows(plain), len(plain.seen)
    first = [wanted.first_seen(request.cached) for request in plain.requests]
    rise, first_rows, positions = torch.zeros((3, total), dtype=torch.int64)
    for row, (index, position) in enumerate(rows):
        seen, request = wanted.first_seen(position), plain.requests[index]
        rise[row], positions[row] = seen - first[index], position
        first_rows[row] = plain.first_row[index] + max(0, seen - request.cached)
    causal, shared, unique = plain.parts.causal, plain.parts.shared, plain.parts.unique
    # the planner says of slopes, too, that nothing is hidden; with sinks it does here
    says = bool(wanted.window) or (wanted.slopes and wanted.sinks)
    if causal is not None and says:
        causal = causal._replace(first_rows=first_rows)
    if shared is not None:
        lo = shared.lo.clone()
        for span, table in enumerate(plain.tables):
            for column, block in enumerate(shared.blocks.tolist()):
                if shared.hi[span, column]:
                    lo[span, column] = first[span] - table.index(block) * block_size
        shared = shared._replace(lo=lo, rise=rise if says else None)
    if unique is not None:
        lo = unique.lo.clone()
        for entry, row in enumerate(unique.rows.tolist()):
            if unique.hi[entry]:
                block = entry if unique.blocks is None else int(unique.blocks[entry])
                index = rows[row][0]
                lo[entry] = first[index] - plain.tables[index].index(block) * block_size
        # what the planner gives; a layer with slopes needs the position of the block
        unique = unique._replace(lo=lo if wanted.slopes else lo.clamp(min=0))
    return plain.parts._replace(
        causal=causal, shared=shared, unique=unique, positions=positions if wanted.slopes else None
    )


def _hide(batch: Batch, plain: Batch, wanted: Features, block_size: int) -> None:
    """Takes what a row does not see from its keys and values, and poisons the slots of what no row sees."""
    used = set()
    for row, (index, position) in enumerate(_rows(plain)):
        seen, pair = wanted.first_seen(position), plain.seen[row]
        assert pair is not None
        batch.seen[row] = pair[0][seen:], pair[1][seen:]
        table = plain.tables[index]
        used |= {(table[p // block_size], p % block_size) for p in range(seen, position + 1)}
    batch.key_cache, batch.value_cache = plain.key_cache.clone(), plain.value_cache.clone()
    for index, request in enumerate(plain.requests):
        for position in range(request.cached):
            place = (plain.tables[index][position // block_size], position % block_size)
            if place not in used:
                batch.key_cache[place] = batch.value_cache[place] = float("nan")


LONG = [
    Request(37, 1, prefix=3),
    Request(21, 9, prefix=3),
    Request(0, 30),
    Request(50, 21),
    Request(33, 1),
    Request(2, 2),
]
"""Longer than most windows: decodes, chunks, a prompt, a verification."""
