"""Numbers that the seconds of a step's attention are a linear function of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import Numbers, Passes, Uses
from vllm_gaudi_ucm.ops.unified_attention.impl.native_jobs import TOKEN_TILE, row_tile

# Of a layer. one: 1. tiles: pieces of work, each for every kv head. loaded: numbers of the cache read, in every pass.
# distinct: bytes of the cache read, once each. halves: as loaded, where a number has two bytes; split: as loaded, in
# passes for the matrix unit. few, many, large: products of a number of the query and one of the cache, in passes of few
# vectors, of more, and for the matrix unit. causal, causal_large: those with new tokens.
# merged: numbers of partial results. out: numbers of the result. calls: passes that no other is like.
# sliced, gathered: numbers of the unique blocks, by how they are read.
LAYER_FEATURES = (
    "one",
    "tiles",
    "loaded",
    "distinct",
    "halves",
    "split",
    "few",
    "many",
    "large",
    "causal",
    "causal_large",
    "merged",
    "out",
    "calls",
    "sliced",
    "gathered",
)
# Of a step. rows, passes, tiles, entries: of the parts and of what is derived from them.
STEP_FEATURES = ("one", "rows", "passes", "tiles", "entries")

# source/attention_tile.h: query vectors that are multiplied one by one, and how many share a register block otherwise.
FEW_VECTORS = 8
VECTORS = 6
LANES = 16  # keys of such a length can be multiplied one by one
# source/attention_strips.h: query vectors of a piece from which on the matrix unit multiplies them, for wide heads and
# for others; how many at once; of which head sizes. Without such a unit the fit finds that they cost what fewer do.
LARGE_VECTORS = 32
LARGE_NARROW_VECTORS = 96
WIDE_HEAD = 128
MATRIX_VECTORS = 32
MATRIX_DEPTH = 32


class Features(NamedTuple):
    """float64 [LAYER_FEATURES] of each layer, float64 [STEP_FEATURES] of the step once."""

    layer: Numbers
    step: Numbers

    def over(self, layers: int) -> Numbers:
        """One vector for the whole step: what each of its layers costs, times their number, then the step's own."""
        return np.concatenate((self.layer * layers, self.step))


def features_of(uses: Uses, passes: Passes, layer: LayerShape) -> Features:
    """See LAYER_FEATURES and STEP_FEATURES."""
    times, rows, tokens, causal = passes.times, passes.rows, passes.tokens, passes.causal
    chunk_rows = sum(uses.chunks.values())
    tile_rows = row_tile(chunk_rows)
    row_tiles = np.ceil(rows / tile_rows)
    long = (row_tiles == 1) & (tokens > TOKEN_TILE + TOKEN_TILE // 2)
    pieces = np.where(long, np.ceil(tokens / TOKEN_TILE), 1)
    vectors = rows * layer.group
    few = (vectors <= FEW_VECTORS) & (layer.element_size == 4) & (layer.dim % LANES == 0)
    large = _are_large(np.minimum(rows, tile_rows) * layer.group, layer)
    tiles = float((times * row_tiles * pieces).sum())
    loads = times * row_tiles * tokens * layer.kv_heads * layer.width
    loaded = float(loads.sum())
    products = times * tokens * layer.kv_heads * layer.width
    padded = np.ceil(vectors / VECTORS) * VECTORS
    own = times * causal * rows * (rows + 1) / 2 * layer.heads * layer.width
    cached = float(sum(use.tokens for use in uses.shared) + uses.unique_tokens)
    total_rows = float(chunk_rows + uses.singles)
    merged = passes.merged + float((times * rows * pieces)[long].sum())
    unique = float(uses.unique_entries * uses.block_size * layer.kv_heads * layer.width)
    by_name = {
        "one": 1.0,
        "tiles": tiles * layer.kv_heads,
        "loaded": loaded,
        "distinct": cached * layer.kv_heads * layer.width * layer.element_size,
        "halves": loaded if layer.element_size == 2 else 0.0,
        "split": float(loads[large].sum()),
        "few": float((products * vectors)[few].sum()),
        "many": float((products * padded)[~few & ~large].sum()),
        "large": float((products * np.ceil(vectors / MATRIX_VECTORS))[large].sum()) * MATRIX_VECTORS,
        "causal": float(own[~large].sum()),
        "causal_large": float(own[large].sum()),
        "merged": merged * layer.heads * layer.value_dim,
        "out": total_rows * layer.heads * layer.value_dim,
        "calls": float(len(times)) + uses.unique_tokens / (2 * TOKEN_TILE),
        "sliced": unique if uses.is_slice else 0.0,
        "gathered": 0.0 if uses.is_slice else unique,
        "rows": total_rows + passes.merged,
        "passes": float(times.sum()),
        "entries": float(uses.unique_entries + sum(use.blocks for use in uses.shared)),
    }
    step = by_name | {"tiles": tiles}
    return Features(
        np.array([by_name[name] for name in LAYER_FEATURES]), np.array([step[name] for name in STEP_FEATURES])
    )


def _are_large(vectors: Numbers, layer: LayerShape) -> NDArray[np.bool_]:
    """Which pieces of so many query vectors the matrix unit multiplies."""
    if layer.dim % MATRIX_DEPTH or layer.value_dim % MATRIX_DEPTH:
        return np.zeros(len(vectors), np.bool_)
    least = LARGE_VECTORS if layer.width >= 2 * WIDE_HEAD else LARGE_NARROW_VECTORS
    return np.asarray(vectors >= least)
