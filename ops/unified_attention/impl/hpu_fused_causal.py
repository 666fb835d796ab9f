"""A step of new tokens alone through Gaudi's FusedSDPA, which keeps all scores on the chip.

It returns no log-sum-exp, so its result cannot be merged: where rows see anything in the cache, `hpu_causal` and
`hpu_causal_tiles` compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_causal_tiles import gather, halves, tile_groups, windows
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_sizes import causal_rows, kv_tokens
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, CausalSlice, CausalTiles

Kernel = Callable[..., Tensor]
"""`FusedSDPA.apply`."""


def fused_causal(
    query: Tensor, key: Tensor, value: Tensor, part: CausalPart, scale: float, out: Tensor, kernel: Kernel
) -> None:
    """Writes the rows of all tiles, which are all there are, or of all slices; zeros to the others."""
    if part.tiles is not None:
        _fused_tiles(query, key, value, part.groups, part.tiles, scale, out, kernel)
        return
    slices = sorted(part.slices)
    position = torch.arange(query.shape[0], device=query.device)
    for lo, hi in zip(
        [0, *(one.query_hi for one in slices)], [*(one.query_lo for one in slices), len(out)], strict=True
    ):
        out[lo:hi].zero_()
    for rows, keys in _tiles(slices):
        own = part.groups[rows, None]
        visible = (own == part.groups[None, keys]) & (own >= 0) & (position[None, keys] <= position[rows, None])
        out[rows] = _attend(query[None, rows], key[None, keys], value[None, keys], visible[None], scale, kernel)[0]


def _tiles(slices: list[CausalSlice]) -> Iterator[tuple[slice, slice]]:
    """(rows, keys) of calls: as the square at the end of a slice is half wasted, short ones are cut further."""
    for query_lo, query_hi, key_lo, key_hi in slices:
        step = causal_rows(query_hi - query_lo, query_hi - key_lo)
        for lo in range(query_lo, query_hi, max(1, step)):
            hi = min(lo + step, query_hi)
            yield slice(lo, hi), slice(key_lo, min(key_hi, hi))


def _fused_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    tiles: CausalTiles,
    scale: float,
    out: Tensor,
    kernel: Kernel,
) -> None:
    """Tiles of a group are the batch of a call, as many as have so many keys."""
    # beside the keys and values as gathered there are those without what is broken
    for group in tile_groups(tiles, kv_tokens(key, value) // 2):
        (window,) = windows(tiles, group, (group.depth + 1) * tiles.rows, groups.shape[0])
        keys, values = gather(key, window.row), gather(value, window.row)
        for half in halves(tiles, group):
            count = window.count(half)
            visible = window.visible(half, groups)
            found = _attend(gather(query, half.rows), keys[:, :count], values[:, :count], visible, scale, kernel)
            out.index_copy_(0, half.rows.flatten(), found.flatten(0, 1))


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, kernel: Kernel) -> Tensor:
    """[batch, rows, heads, ...] of query [batch, rows, heads, dim] over key and value [batch, keys, kv_heads, dim].

    visible: bool [batch, rows, keys]. What a row does not see is masked by adding the lowest number, so it must be
    finite, and a row that sees nothing gets a mean of everything: both are put right here.
    """
    broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    key, value = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (key, value))
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill(~visible, torch.finfo(query.dtype).min)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = kernel(*heads_first, bias[:, None], 0.0, False, scale, "None", False).transpose(1, 2)
    tainted = visible.to(query.dtype) @ broken.to(query.dtype) > 0
    found = found.unflatten(2, (key.shape[2], -1)).masked_fill(tainted[..., None, None], float("nan")).flatten(2, 3)
    return found.masked_fill(~visible.any(-1)[..., None, None], 0)
