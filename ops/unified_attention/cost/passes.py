"""The parts of a step as passes over the cache: sets of rows that read the same tokens together.

Known from what the host knows of the parts; of tensors on an accelerator nothing but their shapes is read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, SharedPart

Numbers = NDArray[np.float64]


class SharedUse(NamedTuple):
    """A shared group.

    first_rows: int64 [requests] first row of each request that uses its blocks; empty where that is not known.
    rows: of all of them. blocks: how many. tokens: that each of its rows sees.
    """

    first_rows: NDArray[np.int64]
    rows: int
    blocks: int
    tokens: int


class Uses(NamedTuple):
    """Who uses what in a step.

    singles: rows with unique blocks. chunks: rows by first row, of each causal group.
    shared: the groups of the shared part, in its order.
    unique_entries: of the unique part; unique_tokens: that its rows see; is_slice: the cache is read up to there.
    """

    singles: int
    chunks: dict[int, int]
    shared: tuple[SharedUse, ...]
    unique_entries: int
    unique_tokens: int
    is_slice: bool
    block_size: int

    def key(self) -> tuple[object, ...]:
        """Equal for steps that differ in the last tokens of blocks only, as a decode's next step does."""
        shared = tuple((use.first_rows.tobytes(), use.rows, use.blocks) for use in self.shared)
        return (self.singles, tuple(self.chunks.items()), shared, self.unique_entries, self.is_slice)


class Passes(NamedTuple):
    """float64 [passes] each: how often a pass like this occurs, its rows, its cached tokens, whether causal (0 or 1).

    merged: rows whose result is put together from several passes, once for each of these.
    """

    times: Numbers
    rows: Numbers
    tokens: Numbers
    causal: Numbers
    merged: float


def uses_of(parts: AttentionParts, block_size: int) -> Uses:
    """Reads who uses what; on CPU also the numbers in the tensors, elsewhere blocks count as full."""
    unique = parts.unique
    entries = 0 if unique is None else unique.rows.shape[0]
    tokens = entries * block_size
    if unique is not None and unique.hi.device.type == "cpu":
        tokens = int((unique.hi - unique.lo).clamp(min=0).sum())
    return Uses(
        0 if unique is None else unique.num_rows,
        {} if parts.causal is None else _chunks(parts.causal),
        () if parts.shared is None else tuple(_shared_uses(parts.shared, block_size)),
        entries,
        tokens,
        unique is not None and unique.blocks is None,
        block_size,
    )


def passes_of(uses: Uses, unsplit: Collection[int] = ()) -> Passes:
    """The passes of a step where requests read the blocks of the shared groups `unsplit` for themselves."""
    chunks = dict.fromkeys(uses.chunks, 0)
    groups: list[tuple[int, int]] = []
    single_tokens = uses.unique_tokens
    merged = 0
    for index, use in enumerate(uses.shared):
        if index not in unsplit and len(use.first_rows) != 1:
            groups.append((use.rows, use.tokens))
            merged += 2 * use.rows
            continue
        for first in use.first_rows.tolist():
            if first in chunks:
                chunks[first] += use.tokens
            else:
                single_tokens += use.tokens
    lines: list[tuple[int, int, float, int]] = [(1, rows, tokens, 0) for rows, tokens in groups]
    lines += [(1, uses.chunks[first], tokens, 1) for first, tokens in chunks.items()]
    if uses.singles and single_tokens:
        lines.append((uses.singles, 1, single_tokens / uses.singles, 0))
    times, rows_of, tokens_of, causal = np.array(lines, np.float64).reshape(-1, 4).T
    return Passes(times, rows_of, tokens_of, causal, float(merged))


def _chunks(part: CausalPart) -> dict[int, int]:
    ends: dict[int, int] = {}
    for slice_ in part.slices:
        ends[slice_.key_lo] = max(ends.get(slice_.key_lo, 0), slice_.query_hi)
    return {first: end - first for first, end in ends.items()}


def _shared_uses(part: SharedPart, block_size: int) -> list[SharedUse]:
    on_host = part.row_spans.device.type == "cpu"
    uses = []
    for group in part.groups:
        blocks = group.block_hi - group.block_lo
        if not on_host:
            uses.append(SharedUse(np.zeros(0, np.int64), group.rows.shape[0], blocks, blocks * block_size))
            continue
        rows = group.rows.numpy()
        spans = part.row_spans.numpy()[rows]
        places = np.unique(spans, return_index=True)[1]
        span = spans[places[:1]]
        columns = slice(group.block_lo, group.block_hi)
        seen = part.hi.numpy()[span, columns] - part.lo.numpy()[span, columns]
        uses.append(SharedUse(rows[places], len(rows), blocks, int(np.maximum(seen, 0).sum())))
    return uses
