"""Choosing tokens and attention over them on CUDA, by Triton's kernels.

Scores of a row are of its own blocks alone: blocks of other requests in the step cost a look at their ranges. What is
chosen is found by a radix select in a fixed number of launches, and nothing is read on the host. The kernels are
imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.chosen_tokens.impl.tiled import TiledChosenTokens
from vllm_gaudi_ucm.ops.chosen_tokens.implementation import IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.parts import NEG_INF, SharedPart

ROWS = 16
"""Rows of a program that scores a shared block, or new tokens."""
NUMBERS = 1 << 25
"""Most scores at a time, 128 MiB, unless a single row has more."""
ATTENDED = 256
"""Most rows whose attention is computed at a time: their partial results are float32."""
PIECE = 4096
"""Columns of a program that chooses."""
BINS, DIGITS = 2048, 3
LARGEST_BLOCK, LARGEST_DIM, LARGEST_HEADS = 256, 256, 128
KINDS = (torch.bfloat16, torch.float16, torch.float32)


class CudaChosenTokens(TiledChosenTokens):
    """By Triton kernels; if chosen by name, also on a CPU under Triton's interpreter. Tiles of torch compute the cases
    that the kernels do not cover.
    """

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def choose(self, index: IndexRows, keys: Tensor, places: TokenPlaces, count: int) -> Tensor:
        if not _covers(index, keys, places):
            return super().choose(index, keys, places, count)
        rows = len(places.slots)
        found = places.slots.new_full((rows, count), -1)
        if not rows or not count:
            return found
        columns = _Columns.of(places)
        singles = min(columns.singles, rows)
        step = max(1, NUMBERS // max(1, columns.most(places)))
        bounds = [*range(0, singles, step), *range(singles, rows, step), rows]
        given = IndexRows(index.query.contiguous(), index.key, index.weights.float().contiguous())
        for lo, hi in pairwise(bounds):
            _Tile.of(columns, places, lo, hi).choose(given, keys, places, found, count)
        return found

    def attend(self, query: Tensor, cache: Tensor, slots: Tensor, scale: float, value_size: int) -> Tensor:
        from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.latent import attend_slots

        found = query.new_empty((*query.shape[:2], value_size))
        for lo in range(0, len(query), ATTENDED):
            part = slice(lo, lo + ATTENDED)
            if not slots.shape[1] or not attend_slots(query[part], cache, slots[part], scale, found[part]):
                return super().attend(query, cache, slots, scale, value_size)
        return found


def _covers(index: IndexRows, keys: Tensor, places: TokenPlaces) -> bool:
    _, heads, dim = index.query.shape
    shared = places.parts.shared
    kinds = index.query.dtype in KINDS and keys.dtype == index.query.dtype == index.key.dtype
    fits = heads <= LARGEST_HEADS and dim <= LARGEST_DIM and places.block_size <= LARGEST_BLOCK
    in_order = keys.stride(1) == 1 and index.key.stride(1) == 1
    return kinds and fits and in_order and (shared is None or shared.rise is None)


class _Columns(NamedTuple):
    """The blocks of rows in a step. shared, unique: most blocks of a row. singles: rows that may have unique blocks.

    shared_places: int32 [spans, shared blocks], see `score_shared`.
    """

    shared: int
    unique: int
    singles: int
    shared_places: Tensor | None

    @classmethod
    def of(cls, places: TokenPlaces) -> _Columns:
        shared, unique = places.parts.shared, places.parts.unique
        most = 0
        if unique is not None:
            assert unique.most_of_row is not None, "validated"
            most = unique.most_of_row
        singles = 0 if unique is None else unique.num_rows
        if shared is None:
            return cls(0, most, singles, None)
        of_span = len(shared.blocks) if shared.most_of_span is None else shared.most_of_span
        return cls(of_span, most, singles, _shared_places(shared, places.block_size))

    def most(self, places: TokenPlaces) -> int:
        """Returns a bound of the columns of a row."""
        causal = places.parts.causal
        new = 0 if causal is None else max((one.query_hi - one.key_lo for one in causal.slices), default=0)
        return (self.shared + self.unique) * places.block_size + new


def _shared_places(part: SharedPart, block_size: int) -> Tensor:
    used = part.hi.clamp(max=block_size) > part.lo.clamp(min=0)
    return used.cumsum(1, dtype=torch.int32) - 1


class _Tile(NamedTuple):
    """The rows lo .. hi and their table of scores. new: the first new token that has a column; hi if none has.

    scores: float32 [rows, columns]. table: int32 [rows, blocks of a row].
    """

    columns: _Columns
    lo: int
    hi: int
    unique: int
    new: int
    scores: Tensor
    table: Tensor

    @classmethod
    def of(cls, columns: _Columns, places: TokenPlaces, lo: int, hi: int) -> _Tile:
        causal = places.parts.causal
        reach = () if causal is None else [one for one in causal.slices if one.query_lo < hi and one.query_hi > lo]
        new = min((one.key_lo for one in reach), default=hi)
        unique = columns.unique if lo < columns.singles else 0
        blocks = columns.shared + unique
        width, device = blocks * places.block_size + hi - new, places.slots.device
        scores = torch.full((hi - lo, width), NEG_INF, dtype=torch.float32, device=device)
        table = torch.empty((hi - lo, max(1, blocks)), dtype=torch.int32, device=device)
        return cls(columns, lo, hi, unique, new, scores, table)

    def choose(self, index: IndexRows, keys: Tensor, places: TokenPlaces, found: Tensor, count: int) -> None:
        """Writes the slots of these rows to `found`, int64 [rows of the step, count]."""
        if not self.scores.shape[1]:
            return
        self._score(index, keys, places)
        self._write(places, found, count)

    def _score(self, index: IndexRows, keys: Tensor, places: TokenPlaces) -> None:
        from vllm_gaudi_ucm.ops.chosen_tokens.impl.cuda.triton import scores as kernels

        parts, sizes, rows, width = places.parts, _sizes(index), self.hi - self.lo, self.scores.shape[1]
        blocks = {"SIZE": places.block_size, "BLOCK_T": _power_of_two(places.block_size)}
        query, weights = index.query, index.weights
        if parts.unique is not None and self.unique and len(parts.unique.rows):
            own = parts.unique
            kernels.score_unique[(len(own.rows),)](
                query, weights, keys, own.blocks, own.rows, own.lo, own.hi, own.places, self.scores, self.table,
                self.lo, rows, self.columns.shared, self.table.shape[1], width, keys.stride(0), own.lo.stride(0),
                own.hi.stride(0), **sizes, **blocks, SLICE=own.blocks is None,
            )  # fmt: skip
        tiles = -(-rows // ROWS)
        if parts.shared is not None and len(parts.shared.blocks):
            part, of_span = parts.shared, self.columns.shared_places
            assert of_span is not None, "of a shared part"
            kernels.score_shared[(len(part.blocks), tiles)](
                query, weights, keys, part.blocks, part.row_spans, part.lo, part.hi, of_span, self.scores, self.table,
                self.lo, rows, self.table.shape[1], width, keys.stride(0), *part.lo.stride(), *part.hi.stride(),
                of_span.stride(0), **sizes, **blocks, ROWS=ROWS,
            )  # fmt: skip
        if parts.causal is not None and self.new < self.hi:
            tokens, first = 128, (self.columns.shared + self.unique) * places.block_size
            kernels.score_new[(-(-(self.hi - self.new) // tokens), tiles)](
                query, weights, index.key, parts.causal.groups, self.scores, self.lo, rows, self.new, first, width,
                index.key.stride(0), **sizes, BLOCK_T=tokens, ROWS=ROWS,
            )  # fmt: skip

    def _write(self, places: TokenPlaces, found: Tensor, count: int) -> None:
        from vllm_gaudi_ucm.ops.chosen_tokens.impl.cuda.triton import choice as kernels

        (rows, width), scores = self.scores.shape, self.scores
        pieces = -(-width // PIECE)
        histograms = torch.zeros((rows, DIGITS, BINS), dtype=torch.int32, device=scores.device)
        counts = torch.empty((rows, pieces, 2), dtype=torch.int32, device=scores.device)
        least = torch.empty((rows, 2), dtype=torch.int32, device=scores.device)
        grid, options = (rows, pieces), {"PIECE": PIECE, "num_warps": 8}
        for digit in range(DIGITS):
            kernels.count_digits[grid](scores, histograms, width, count, DIGIT=digit, **options)
        kernels.count_best[grid](scores, histograms, counts, least, width, count, pieces, **options)
        first = (self.columns.shared + self.unique) * places.block_size
        kernels.write_best[grid](
            scores, counts, least, self.table, places.slots, found, self.lo, width, count, pieces,
            self.table.shape[1], first, self.new, SIZE=places.block_size, PIECES=_power_of_two(pieces), **options,
        )  # fmt: skip


def _sizes(index: IndexRows) -> dict[str, Any]:
    """Returns the compile-time arguments of all kernels that score."""
    import triton.language as tl
    from triton import knobs

    _, heads, dim = index.query.shape
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    # Triton's interpreter has no matrix product of bf16
    compute = tl.float32 if knobs.runtime.interpret else kinds[index.query.dtype]
    return {
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_H": _power_of_two(heads),
        "BLOCK_D": _power_of_two(dim),
        "COMPUTE": compute,
        "num_warps": 8,
    }


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least 16, as matrix products need."""
    return max(16, 1 << (size - 1).bit_length())
