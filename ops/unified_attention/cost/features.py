"""Numbers that the seconds of a step's attention are a linear function of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import Numbers, Passes, Uses
from vllm_gaudi_ucm.ops.unified_attention.impl.native_jobs import ROW_TILE, TOKEN_TILE

# Of a layer. one: 1. tiles: pieces of work, each for every kv head. loaded: numbers of the cache read, in every pass.
# distinct: bytes of the cache read, once each. halves: as loaded, where a number has two bytes. few, many, causal:
# products of a number of the query and one of the cache, in passes of few vectors, in others, and with new tokens.
# merged: numbers of partial results. out: numbers of the result. calls: passes that no other is like.
# sliced, gathered: numbers of the unique blocks, by how they are read.
LAYER_FEATURES = (
    "one",
    "tiles",
    "loaded",
    "distinct",
    "halves",
    "few",
    "many",
    "causal",
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
    row_tiles = np.ceil(rows / ROW_TILE)
    long = (row_tiles == 1) & (tokens > TOKEN_TILE + TOKEN_TILE // 2)
    pieces = np.where(long, np.ceil(tokens / TOKEN_TILE), 1)
    vectors = rows * layer.group
    few = (vectors <= FEW_VECTORS) & (layer.element_size == 4) & (layer.dim % LANES == 0)
    tiles = float((times * row_tiles * pieces).sum())
    loaded = float((times * row_tiles * tokens).sum()) * layer.kv_heads * layer.width
    products = times * tokens * layer.kv_heads * layer.width
    padded = np.ceil(vectors / VECTORS) * VECTORS
    cached = float(sum(use.tokens for use in uses.shared) + uses.unique_tokens)
    total_rows = float(sum(uses.chunks.values()) + uses.singles)
    merged = passes.merged + float((times * rows * pieces)[long].sum())
    unique = float(uses.unique_entries * uses.block_size * layer.kv_heads * layer.width)
    by_name = {
        "one": 1.0,
        "tiles": tiles * layer.kv_heads,
        "loaded": loaded,
        "distinct": cached * layer.kv_heads * layer.width * layer.element_size,
        "halves": loaded if layer.element_size == 2 else 0.0,
        "few": float((products * vectors)[few].sum()),
        "many": float((products * padded)[~few].sum()),
        "causal": float((times * causal * rows * (rows + 1) / 2).sum()) * layer.heads * layer.width,
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
