"""Unified Attention for Gaudi: batched matrix products and a softmax per tile, nothing read on the host.

Every loop is bounded by shapes and by what is host-side in the parts already, so a bucket is one graph and no layer is
cut. Tiles are sized for the card's SRAM, and results of causal rows go straight to `out`: no tensor of all rows in
float32 passes through the card's memory. Runs on any device. What it computes is what the reference defines, but for
keys with an infinite element: they are not looked at for themselves, and where a score is -Inf, it has the weight 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_blocks import selected, shared, unique
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_causal import (
    Rows,
    attend_causal,
    attend_causal_tiles,
    causal_tiles,
    fused_causal,
    gather,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import Scaling
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    NEG_INF,
    AttentionParts,
    CausalPart,
    CausalTiles,
    Partial,
    combine,
)
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec


class HpuAttention(AttentionImplementation):
    """Made for Gaudi; by name on any device."""

    devices = frozenset({"hpu"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionParts,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
    ) -> bool:
        """Always True: no tensors need the reference."""
        parts = plan
        scaling = Scaling.of(query, key_cache, spec.scale)
        cached = None
        if parts.unique is not None:
            cached = unique(query, key_cache, value_cache, parts.unique, scaling)
        if parts.shared is not None:
            cached = _add(cached, shared(query, key_cache, value_cache, parts.shared, scaling))
        if parts.selected is not None:
            blocks = parts.selected.blocks if selected_blocks is None else selected_blocks
            cached = _add(cached, selected(query, key_cache, value_cache, parts.selected, scaling, blocks))
        fused = hpu_kernels.FUSED_SDPA
        if fused is not None and parts.causal is not None and cached is None and query.dtype == torch.bfloat16:
            fused_causal(query, key, value, parts.causal, spec.scale, out, fused)
            return True
        if parts.causal is None:
            _write(out, Rows(0, 1, 0, 0, out.shape[0]), None, cached)
            return True
        if parts.causal.tiles is not None:
            _write_tiles(query, key, value, parts.causal.groups, parts.causal.tiles, scaling, cached, out)
            return True
        _write_causal(query, key, value, parts.causal, scaling, cached, out)
        return True


def _write_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: CausalPart,
    scaling: Scaling,
    cached: Partial | None,
    out: Tensor,
) -> None:
    """Tile by tile, each with what its rows see in the cache; rows outside of all slices see only that."""
    rows, covered = out.shape[0], 0 if cached is None else cached.max.shape[0]
    position = 0
    for one in sorted(part.slices):
        if one.query_lo > position:
            _write(out, Rows(0, 1, 0, position, one.query_lo), None, cached)
        position = one.query_hi
    if position < rows:
        _write(out, Rows(0, 1, 0, position, rows), None, cached)
    # side by side only where a tile is covered wholly or not at all
    apart = covered if covered < rows else 0
    for tile in causal_tiles(part, key, value, query.shape[1], apart):
        _write(out, tile.rows, attend_causal(query, key, value, part, scaling, tile), cached)


def _write_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    tiles: CausalTiles,
    scaling: Scaling,
    cached: Partial | None,
    out: Tensor,
) -> None:
    """Tiles of rows that data chooses, each with what its rows see in the cache."""
    covered = 0 if cached is None else cached.max.shape[0]
    if cached is not None and covered < out.shape[0]:
        # one row that has seen nothing stands for all that the cached parts do not cover
        cached = Partial(*(_extend(whole, 1, fill) for whole, fill in zip(cached, (0, NEG_INF, 0), strict=True)))
    for rows, causal in attend_causal_tiles(query, key, value, groups, tiles, scaling):
        known = None if cached is None else Partial(*(gather(whole, rows.clamp(max=covered)) for whole in cached))
        found = _normalised(causal if known is None else combine(causal, known))
        out.index_copy_(0, rows.flatten(), found.flatten(0, 1).to(out.dtype))


def _write(out: Tensor, rows: Rows, causal: Partial | None, cached: Partial | None) -> None:
    """Normalises what these rows see, in the tile and in the cache (first rows only), and writes it."""
    place = rows.of(out)
    known = None if cached is None else _cover(cached, rows)
    if causal is None and known is None:
        place.zero_()
        return
    both = known if causal is None else causal if known is None else combine(causal, known)
    assert both is not None
    place.copy_(_normalised(both))


def _normalised(seen: Partial) -> Tensor:
    """The largest score of a row has weight 1, so a sum of 0 means exactly: nothing seen."""
    return seen.out / torch.where(seen.sum == 0, 1.0, seen.sum)[..., None]


def _cover(cached: Partial, rows: Rows) -> Partial | None:
    """The rows [slices, rows, ...] of a partial that covers the first rows, empty where it ends; None beyond."""
    covered = cached.max.shape[0]
    if rows.first + rows.lo >= covered:
        return None
    missing = rows.end - covered
    if missing > 0:
        cached = Partial(*(_extend(whole, missing, fill) for whole, fill in zip(cached, (0, NEG_INF, 0), strict=True)))
    return Partial(*(rows.of(whole) for whole in cached))


def _extend(tensor: Tensor, count: int, fill: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), fill)])


def _add(some: Partial | None, other: Partial | None) -> Partial | None:
    """Partial over the keys of both, of as many rows as the longer one covers."""
    if some is None or other is None:
        return other if some is None else some
    short, long = sorted((some, other), key=lambda partial: partial.max.shape[0])
    covered = short.max.shape[0]
    both = combine(Partial(*(whole[:covered] for whole in long)), short)
    if covered == long.max.shape[0]:
        return both
    for whole, first in zip(long, both, strict=True):
        whole[:covered] = first
    return long
