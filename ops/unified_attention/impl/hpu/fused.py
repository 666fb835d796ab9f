"""Computes a step of prompts only by Gaudi's fused kernel: with nothing to merge, its missing statistics are not
needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.rows import chunks
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.tiles import PRODUCTS, TileWindow, tile_products
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, CausalTiles
from vllm_gaudi_ucm.ops.unified_attention.score_memory import MOST_CHUNKS

Kernel = Callable[..., Tensor]
"""The type of `FusedSDPA.apply`."""


def fused_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: CausalPart,
    hidden: Tensor | TileWindow,
    scale: float,
    out: Tensor,
    kernel: Kernel,
) -> None:
    """Writes all rows; those without a group are zeros. hidden: bool [rows, rows], or the window of the tiles."""
    key, value, broken = finite(key, value, query.dtype)
    # the kernel knows one head size
    width = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    tensors = query, key, value, broken
    if isinstance(hidden, TileWindow):
        assert part.tiles is not None, "a window is that of tiles"
        found = _attend_tiles(*tensors, part.tiles, hidden, scale, kernel)
    else:
        found = _attend_chunks(*tensors, part, hidden, scale, kernel)
    out.copy_(found[..., :width].masked_fill((part.groups < 0)[:, None, None], 0))


def finite(key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys and values without NaN and Inf, and [tokens, kv_heads] in `dtype`, 1 for a token that had one.

    Tokens that a row does not see are masked by adding the lowest number, so all values must be finite.
    """
    broken_key, broken_value = (tensor - tensor for tensor in (key, value))
    broken = ((broken_key.sum(-1) + broken_value.sum(-1)) != 0).to(dtype)
    return key.masked_fill(broken_key != 0, 0), value.masked_fill(broken_value != 0, 0), broken


def _attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    broken: Tensor,
    part: CausalPart,
    hidden: Tensor,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    found = []
    for lo, hi, key_lo, key_hi in chunks(query.shape[0], 0, part, MOST_CHUNKS):
        tokens = slice(key_lo, key_hi)
        tensors = key[None, tokens], value[None, tokens], broken[None, tokens]
        found.append(attend_hidden(query[None, lo:hi], *tensors, hidden[None, lo:hi, tokens], scale, kernel)[0])
    return torch.cat(found)


def _attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    broken: Tensor,
    tiles: CausalTiles,
    window: TileWindow,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    """Attends tiles, as the batch of a call."""
    rows = _gather(query, window.rows)
    keys, values, tainted = (_gather(tensor, window.keys) for tensor in (key, value, broken))
    found, places = [], []
    for first, last, lo, hi, begin, end in tile_products(tiles, PRODUCTS):
        tokens = (slice(first, last), slice(begin, end))
        hidden = window.hidden[first:last, lo:hi, begin:end]
        piece = attend_hidden(
            rows[first:last, lo:hi], keys[tokens], values[tokens], tainted[tokens], hidden, scale, kernel
        )
        # a repeated row adds 0: the result of copying to an index twice is not defined on the card
        stale = window.stale[first:last, lo:hi, None, None]
        found.append(piece.masked_fill(stale, 0).flatten(0, 1))
        places.append(window.rows[first:last, lo:hi].flatten())
    everything = query.new_zeros((*query.shape[:2], value.shape[-1]))
    return everything.index_add(0, torch.cat(places), torch.cat(found))


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """Gathers rows [*index.shape, ...] of a tensor."""
    return tensor.index_select(0, index.flatten()).unflatten(0, index.shape)


def attend_hidden(
    query: Tensor, key: Tensor, value: Tensor, broken: Tensor, hidden: Tensor, scale: float, kernel: Kernel
) -> Tensor:
    """Returns [batch, rows, heads, ...], attention of query [batch, rows, heads, dim] over key and value [batch, keys,
    kv_heads, dim].

    hidden: bool [batch, rows, keys]. broken: [batch, keys, kv_heads], 1 for a token that was not finite.
    """
    bias = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    # recompute: probabilities are never in the card's memory. With a mask, never causal: the kernel takes one or the
    # other
    found = kernel(*heads_first, bias[:, None], 0.0, False, scale, "None", True).transpose(1, 2)
    tainted = torch.bmm((~hidden).to(query.dtype), broken)
    # the root of a negative number, because a NaN literal would break the graph
    return (found.unflatten(2, (key.shape[2], -1)) + (-tainted).sqrt()[..., None, None]).flatten(2, 3)
