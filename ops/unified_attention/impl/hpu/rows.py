"""Multiplies rows by tokens: shared blocks, and new tokens if no bound is known on how far rows look back.

Every row is multiplied with every token of its chunk, shared tokens and new ones in one product; groups and slices only
tell which products are unnecessary. A causal step has a few chunks of rows, so that less is multiplied above the
diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.narrow_floats import widened
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import (
    LOWEST,
    Products,
    Seen,
    value_dtype,
    weigh,
    without_garbage,
)
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, SharedPart
from vllm_gaudi_ucm.ops.unified_attention.score_memory import LEAST_ROWS


class Chunk(NamedTuple):
    """Rows [lo, hi), multiplied with tokens [key_lo, key_hi)."""

    lo: int
    hi: int
    key_lo: int
    key_hi: int


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    shared: SharedPart | None,
    causal: CausalPart | None,
    mask: Tensor,
    products: Products,
    most_chunks: int,
    distances: Tensor | None = None,
) -> Seen:
    """Attends all rows to the shared part, and to the causal part's slices.

    query: [kv_heads, rows, groups, dim], prepared. key, value: the new tokens. mask: see `hidden_tokens`.
    distances: see `token_distances`. One of the parts is given.
    """
    rows, groups = query.shape[1:3]
    keys, values = [], []
    if shared is not None:
        ids, like = shared.blocks, key
        both = products.read(
            key_cache, value_cache, lambda cache: widened(cache.index_select(0, ids), like.dtype).flatten(0, 1)
        )
        keys.append(both[0])
        values.append(both[1])
    before = keys[0].shape[0] if keys else 0
    if causal is not None:
        keys.append(key)
        values.append(value)
    key, value = without_garbage(_join(keys, 0), _join(values, 0))
    key, value = products.key_view(key), value.to(value_dtype(value))
    pieces = []
    for lo, hi, key_lo, key_hi in chunks(rows, before, causal, most_chunks):
        tokens = slice(key_lo, key_hi)
        scores = products.scores(query[:, lo:hi].flatten(1, 2), key[tokens].transpose(0, 1))
        scores = scores.unflatten(1, (hi - lo, groups))
        if distances is not None:
            scores = products.by_distance(scores, distances[lo:hi, None, tokens])
        scores = scores.masked_fill(mask[lo:hi, None, tokens], LOWEST)
        weights, top, total = weigh(scores)
        out = torch.bmm(weights.flatten(1, 2).to(value.dtype), value[tokens].transpose(0, 1))
        pieces.append((out.unflatten(1, (hi - lo, groups)), top, total))
    out, top, total = (_join(list(column), 1).transpose(0, 1) for column in zip(*pieces, strict=True))
    return Seen(out.float(), top, total)


def chunks(rows: int, before: int, causal: CausalPart | None, most: int) -> list[Chunk]:
    """Returns chunks of `rows` rows over `before` shared tokens and then the new tokens."""
    count = max(1, min(most, rows // LEAST_ROWS))
    step = -(-rows // count)
    found = []
    for lo in range(0, rows, step):
        hi = min(lo + step, rows)
        key_lo, key_hi = 0, before
        if causal is not None:
            key_lo, key_hi = _new_keys(causal, lo, hi)
            # with shared tokens before them, new tokens are taken from the first, so that the keys are one range
            key_lo, key_hi = 0 if before else key_lo, before + key_hi
        found.append(Chunk(lo, hi, key_lo, max(key_hi, key_lo + 1)))
    return found


def _new_keys(causal: CausalPart, lo: int, hi: int) -> tuple[int, int]:
    """Returns the new tokens that rows [lo, hi) may see according to the slices; none is later than the last row."""
    mine = [one for one in causal.slices if one.query_lo < hi and one.query_hi > lo]
    first, last = min([hi - 1, *(one.key_lo for one in mine)]), max([0, *(one.key_hi for one in mine)])
    return first, min(hi, last)


def hidden_tokens(shared: SharedPart | None, causal: CausalPart | None, token: Tensor | None) -> Tensor | None:
    """Returns bool [rows, shared tokens, then new tokens]: the tokens that a row does not see. None if there are
        neither.

    causal: this part, if its rows are multiplied with new tokens in chunks. token: int64 [block_size] 0, 1, ..
    """
    found = []
    if shared is not None and token is not None:
        lo = None if shared.from_first else shared.lo.index_select(0, shared.row_spans)
        if lo is not None and shared.rise is not None:
            lo = lo + shared.rise[:, None]
        found.append(outside(token, lo, shared.hi.index_select(0, shared.row_spans)).flatten(1))
    if causal is not None:
        groups = causal.groups
        place = torch.arange(groups.shape[0], device=groups.device)
        own = groups[:, None]
        unseen = (own != groups) | (own < 0) | (place > place[:, None])
        if causal.first_rows is not None:
            unseen = unseen | (place < causal.first_rows[:, None])
        found.append(unseen)
    return _join(found, 1) if found else None


def token_distances(
    shared: SharedPart | None, causal: CausalPart | None, token: Tensor | None, positions: Tensor
) -> Tensor | None:
    """Returns fp32 [rows, tokens] for the tokens of `hidden_tokens`: how far before the row each visible token is."""
    found = []
    if shared is not None and token is not None:
        begin = positions[:, None] + shared.lo.index_select(0, shared.row_spans)
        found.append((begin[..., None] - token).flatten(1))
    if causal is not None:
        place = torch.arange(causal.groups.shape[0], device=positions.device)
        found.append(place[:, None] - place)
    return _join(found, 1).float() if found else None


def outside(token: Tensor, lo: Tensor | None, hi: Tensor) -> Tensor:
    """Bool [..., block_size] for bounds [...]: the tokens of a block that are not in [lo, hi). lo of None means 0."""
    after = token >= hi[..., None]
    return after if lo is None else after | (token < lo[..., None])


def _join(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
