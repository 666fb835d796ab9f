"""Attends to cached blocks that rows of one request see, the unique and the selected part: by block, then by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.index_maximum import index_maximum
from vllm_gaudi_ucm.ops.narrow_floats import widened
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import (
    LEAST_SUM,
    LOWEST,
    Products,
    Seen,
    packed,
    value_dtype,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.rows import outside
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, UniquePart


class Blocks(NamedTuple):
    """Blocks and the rows that read them; a block's rows see the same tokens of it. The same in all layers except for
    ids.

    ids: int64 [blocks] to gather; None: the first blocks of the cache, or the blocks that a layer has chosen.
    before: int64 [n] blocks to gather before the blocks that a layer has chosen; None: there are none.
    is_chosen: whether a layer's choice is gathered.
    rows: int64 [blocks * most rows], by block.
    unseen: bool [blocks, block_size] tokens that the rows do not see.
    absent: bool [blocks, most rows] places without a row, whose `rows` are arbitrary; None: there are none.
    distances: fp32 [blocks, block_size] of a block's tokens from its row, for layers with slopes.
    """

    ids: Tensor | None
    before: Tensor | None
    is_chosen: bool
    rows: Tensor
    unseen: Tensor
    absent: Tensor | None = None
    distances: Tensor | None = None

    def gathered(self, chosen: Tensor | None) -> Tensor | None:
        """Returns the blocks to gather, int64 [blocks]; None: the first blocks of the cache. chosen: int64 [selected]
        of a layer, instead of `ids`.
        """
        if not self.is_chosen or chosen is None:
            return self.ids
        return chosen if self.before is None else torch.cat((self.before, chosen))


def blocks_of(
    unique: UniquePart | None, selected: SelectedPart | None, token: Tensor | None, positions: Tensor | None = None
) -> tuple[Blocks, ...]:
    """Returns the blocks of both parts, in one if each block has one row. token: int64 [block_size] 0, 1, ..;
    positions: int64 [rows], for layers with slopes, which have no selected part.
    """
    own = others = None
    if token is None:
        return ()
    if unique is not None and unique.rows.shape[0] and unique.num_rows:
        unseen = outside(token, None if unique.from_first else unique.lo, unique.hi)
        far = None
        if positions is not None:
            far = ((positions.index_select(0, unique.rows) + unique.lo)[:, None] - token).float()
        own = Blocks(unique.blocks, None, False, unique.rows, unseen, distances=far)
    if selected is not None and 0 not in (selected.blocks.shape[0], selected.first_rows.shape[0]):
        others = _selected(selected, token)
    if own is not None and others is not None and others.absent is None:
        assert selected is not None, "others are chosen blocks"
        return (_together(own, others, selected.blocks),)
    return tuple(one for one in (own, others) if one is not None)


def _together(own: Blocks, others: Blocks, chosen: Tensor) -> Blocks:
    """Joins both parts. The slice of the unique part is then gathered: an extra copy of its blocks, but half of the
    operators.
    """
    places = torch.arange(own.rows.shape[0], device=chosen.device) if own.ids is None else own.ids
    rows, unseen = torch.cat((own.rows, others.rows)), torch.cat((own.unseen, others.unseen))
    return Blocks(torch.cat((places, chosen)), places, True, rows, unseen)


def _selected(part: SelectedPart, token: Tensor) -> Blocks:
    live = part.num_rows.index_select(0, part.spans)
    first = part.first_rows.index_select(0, part.spans)
    if part.max_rows == 1:
        # a span without a row sees nothing
        return Blocks(part.blocks, None, True, first, outside(token, None, part.hi * live))
    step = torch.arange(part.max_rows, device=token.device)
    # a place without a row repeats one of the span's own
    rows = first[:, None] + torch.minimum(step, (live - 1).clamp(min=0)[:, None])
    return Blocks(part.blocks, None, True, rows.flatten(), outside(token, None, part.hi), step >= live[:, None])


def attend_blocks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Blocks,
    chosen: Tensor | None,
    products: Products,
    seen: Seen | None,
) -> Seen:
    """Adds these blocks to what rows have seen.

    query: [kv_heads, rows, groups, dim], prepared. chosen: int64 [selected], the choice of the layer, or None for the
        part's own blocks.
    """
    rows, unseen, ids = blocks.rows, blocks.unseen, blocks.gathered(chosen)
    count = unseen.shape[0]
    most = rows.shape[0] // count
    kv_heads, num_rows, groups, _ = query.shape
    both = products.read(key_cache, value_cache, lambda cache: widened(_gather(cache, ids, count), query.dtype))
    key, value = (one.permute(2, 0, 1, 3) for one in both)
    asked = query.index_select(1, rows).view(kv_heads * count, most * groups, -1)
    scores = products.scores(asked, products.key(key).flatten(0, 1)).view(kv_heads, count, most, groups, -1)
    if blocks.distances is not None:
        scores = products.by_distance(scores, blocks.distances[:, None, None])
    hidden = unseen[:, None, None]
    if blocks.absent is not None:
        hidden = hidden | blocks.absent[..., None, None]
    scores = scores.masked_fill(hidden, LOWEST).flatten(1, 2)

    top = row_maxima(seen, rows, scores.amax(-1).transpose(0, 1), num_rows)
    weights = torch.exp(scores - top.index_select(0, rows).transpose(0, 1)[..., None])
    value = packed(value.masked_fill(unseen[..., None], 0), value_dtype(value)).flatten(0, 1)
    out = torch.bmm(weights.view(*asked.shape[:2], -1).to(value.dtype), value)
    if blocks.absent is not None:
        # a broken value is in the results of all places of the block, and these are somebody else's
        out = out.view(kv_heads, count, most, groups, -1).masked_fill(blocks.absent[..., None, None], 0)
    out = out.view(kv_heads, count * most, groups, -1).transpose(0, 1).float()
    return add_to_rows(seen, top, rows, out, weights.sum(-1).transpose(0, 1))


def _gather(cache: Tensor, ids: Tensor | None, count: int) -> Tensor:
    return cache[:count] if ids is None else cache.index_select(0, ids)


def row_maxima(seen: Seen | None, rows: Tensor, tops: Tensor, num_rows: int) -> Tensor:
    """Returns the maxima fp32 [rows, ...] of what is seen and of pieces [pieces, ...] of these rows."""
    before = tops.new_full((num_rows, *tops.shape[1:]), LOWEST) if seen is None else seen.max
    return index_maximum(before, rows, tops)


def add_to_rows(seen: Seen | None, top: Tensor, rows: Tensor, out: Tensor, total: Tensor) -> Seen:
    """Adds pieces [pieces, ...], weighted by the maxima `top` of all rows, to what is seen."""
    if seen is None:
        before, sums = out.new_zeros((*top.shape, out.shape[-1])), torch.full_like(top, LEAST_SUM)
    else:
        weight = torch.exp(seen.max - top)
        before, sums = seen.out * weight[..., None], seen.sum * weight
    return Seen(before.index_add(0, rows, out), top, sums.index_add(0, rows, total))
