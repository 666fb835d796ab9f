"""Blocks that are chosen for many rows together, as for a tile of a prompt: by the kernel for a request's own blocks.

The kernel for a few rows holds all rows of a span in one program. Here a span has several tiles of rows, each of which
reads the span's list of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.own import own_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import tiled
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import (
    CudaPlan,
    Lists,
    SharedTiles,
    programs_of,
    selected_place,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.own import attend_own
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Work
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, SharedPart


class ChosenTiles(NamedTuple):
    """The tiles of all spans, and int32 [tiles], the span of each. A tile reads its span's list of blocks.

    places: int64 [entries], where each entry of the lists goes in `tiles.column_blocks`; invisible ones go to the end.
    part: ranges that no entry needs, because all of its tokens are seen.
    """

    tiles: SharedTiles
    spans: Tensor
    places: Tensor
    part: SharedPart


def chosen_tiles(layer: Layer, plan: CudaPlan, part: SelectedPart, blocks: Tensor | None) -> Work:
    """Launches the tiles of all spans. blocks: int64 [selected], chosen by the layer; None: the blocks of the part.

    All tokens of a chosen block are seen: `hi` is its size, or 0 for a pad.
    """
    tile, lists = own_tile(layer), plan.selected_lists()
    assert lists is not None, "the part has room for blocks"
    rows_per_tile = tile.block_m // layer.group
    made = plan.kept(("chosen tiles", rows_per_tile), lambda: _tiles(part, lists, layer.rows, rows_per_tile))
    entries = lists.blocks if blocks is None else blocks[lists.order]
    # a new tensor for each layer: the one of the layer before may still be read
    columns = torch.zeros_like(made.tiles.column_blocks).scatter_(0, made.places, entries.int())
    tiles = made.tiles._replace(column_blocks=columns)
    programs = programs_of(layer, tiles.num_tiles * entries.shape[0])
    return tiled(attend_own, "selected", layer, plan, made.part, tile, tiles, made.spans, programs)


def _tiles(part: SelectedPart, lists: Lists, rows: int, rows_per_tile: int) -> ChosenTiles:
    """Makes the tiles; queues work on the device, reads nothing on the host."""
    (count,), device, entries = part.first_rows.shape, part.first_rows.device, lists.order.shape[0]
    per_span = -(-part.max_rows // rows_per_tile)
    lane = torch.arange(per_span * rows_per_tile, device=device)
    row = torch.where(lane < part.num_rows[:, None], part.first_rows[:, None] + lane, -1).int()
    # a row's place among lanes of its span, of which a span has as many as its tiles have rows
    place = selected_place(part._replace(max_rows=per_span * rows_per_tile), rows)
    sizes = lists.offsets.diff()
    begins = torch.arange(per_span, device=device) * rows_per_tile
    used = torch.where(begins < part.num_rows[:, None], sizes[:, None], 0).flatten()
    offsets = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    spans = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(per_span)
    index = torch.arange(entries, device=device)
    owner = lists.owners.long()
    # an invisible entry has the owner `count`
    places = torch.where(owner < count, owner * entries + index - lists.offsets[owner], count * entries)
    columns = torch.zeros(count * entries + 1, dtype=torch.int32, device=device)
    none = torch.zeros((1, 1), dtype=torch.int32, device=device)
    unread = SharedPart(lists.order, place, none, none, ())
    return ChosenTiles(SharedTiles(row.flatten(), place, columns, columns, sizes, offsets), spans, places, unread)
