"""The own blocks of requests with several rows: in the shared part, but used by the rows of a single span.

A tile of the shared part holds rows of several short requests and would multiply each with the blocks of all of them.
Here a tile has rows of one span only, and each of its blocks is seen by all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.joined import Joined, sorted_by_owner
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import selected_lists, tiled
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import (
    STAGE,
    CudaPlan,
    SharedTiles,
    Tile,
    programs_of,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.own import attend_own, divide_columns, list_own, place_own
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Work
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, SharedPart

# Shared blocks that a program examines in one step; rows that it places, and rows or spans that it examines for them.
COLUMNS, TAKEN, STEP = 128, 32, 256


class Division(NamedTuple):
    """The shared part, divided by the users of each block.

    users: int32 [shared] number of spans that see a token of the block; 1: the block is the span's own. common: the
    part without own blocks.
    """

    users: Tensor
    common: SharedPart


def divide(part: SharedPart, block_size: int) -> Division:
    """Finds the blocks that are a span's own; queues work on the device, reads nothing on the host."""
    spans, num_columns = part.hi.shape
    common_hi = torch.empty((spans, num_columns), dtype=torch.int32, device=part.hi.device)
    users = common_hi.new_empty(num_columns)
    divide_columns[(-(-num_columns // COLUMNS),)](
        part.lo,
        part.hi,
        users,
        common_hi,
        spans,
        num_columns,
        *part.lo.stride(),
        *part.hi.stride(),
        BLOCK_SIZE=block_size,
        SPANS=16,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return Division(users, part._replace(hi=common_hi))


class OwnAndChosen(NamedTuple):
    """joined: a list for each span of the selected part, with its chosen blocks and its own blocks. division: the
    shared part, in which these blocks have no user.
    """

    joined: Joined
    division: Division


def own_and_chosen(plan: CudaPlan) -> OwnAndChosen:
    """Returns the lists of a plan with `joined_own`."""
    shared, selected = plan.parts.shared, plan.parts.selected
    assert shared is not None, "joined_own"
    assert selected is not None, "joined_own"
    return plan.kept(("own and chosen", 0), lambda: _join(shared, selected, plan.block_size))


def selected_with_own(layer: Layer, plan: CudaPlan, blocks: Tensor | None) -> Work:
    """Launches the rows of each request with the blocks chosen for it, and its own. blocks: see
    `unique_and_selected`.
    """
    part, both = plan.parts.selected, own_and_chosen(plan).joined
    assert part is not None, "joined_own"
    entries = both.blocks_with(part.blocks if blocks is None else blocks)
    return selected_lists(layer, plan, part, both.lists, entries)


def _join(shared: SharedPart, selected: SelectedPart, block_size: int) -> OwnAndChosen:
    """Joins the few own blocks of a request with the many that are chosen for it. On their own they were a launch that
    found no room until the other launch had ended (H100, 8 verifications of 5 rows: 22 of 82 microseconds).
    """
    division = divide(shared, block_size)
    (spans, _), count = shared.hi.shape, selected.first_rows.shape[0]
    owner = (shared.hi.clamp(max=block_size) > shared.lo.clamp(min=0)).int().argmax(0)
    # the choice of each span of the shared part; `count` if it has none
    span = torch.where(selected.num_rows > 0, shared.row_spans[selected.first_rows], spans)
    choices = torch.full((spans + 1,), count, dtype=span.dtype, device=span.device)
    choices.scatter_(0, span, torch.arange(count, dtype=span.dtype, device=span.device))
    choice = choices[owner]
    joins = (division.users == 1) & (choice < count)
    lo, hi = (ranges.gather(0, owner[None])[0] for ranges in (shared.lo, shared.hi))
    joined = sorted_by_owner(
        torch.cat((selected.spans, choice)),
        torch.cat(((selected.hi > 0) & (selected.num_rows > 0)[selected.spans], joins)),
        count,
        torch.cat((selected.blocks, shared.blocks)),
        torch.cat((torch.zeros_like(selected.hi), lo)).int(),
        torch.cat((selected.hi, hi)).int(),
        slice(selected.blocks.shape[0]),
    )
    return OwnAndChosen(joined, division._replace(users=torch.where(joins, 0, division.users)))


def own_tile(layer: Layer) -> Tile:
    """Returns the sizes of the causal part, which is limited by the same products: two programs per multiprocessor."""
    if layer.huge:
        return Tile(power_of_two(layer.group), layer.tokens_per_tile(STAGE), 2, 4)
    if layer.wide:
        return Tile(max(power_of_two(layer.group), 32), min(32, layer.tokens_per_tile(STAGE)), 2, 4)
    return Tile(max(power_of_two(layer.group), 64), min(64, layer.tokens_per_tile(STAGE)), 3, 4)


def own(layer: Layer, plan: CudaPlan, part: SharedPart, division: Division) -> Work:
    """Launches the rows of each span with its own blocks. part: the whole shared part."""
    tile = own_tile(layer)
    rows_per_tile = tile.block_m // layer.group
    tiles, spans = plan.kept(
        ("own", rows_per_tile), lambda: _tiles(part, division, plan.block_size, layer.rows, rows_per_tile)
    )
    programs = programs_of(layer, tiles.num_tiles * part.blocks.shape[0])
    return tiled(attend_own, "own", layer, plan, part, tile, tiles, spans, programs)


def most_tiles(rows: int, spans: int, rows_per_tile: int) -> int:
    """Returns the most tiles that rows of this many spans need: each span may end in the middle of one."""
    return rows // rows_per_tile + min(rows, spans)


def _tiles(
    part: SharedPart, division: Division, block_size: int, rows: int, rows_per_tile: int
) -> tuple[SharedTiles, Tensor]:
    """Makes tiles of rows of one span, and int32 [tiles], the span of each.

    They use the lists of spans: columns and column_blocks [spans, shared], whole_counts [spans]; see `list_own`.
    """
    users, (spans, num_columns) = division.users, part.hi.shape
    columns, column_blocks = users.new_empty((2, spans, num_columns))
    counts, whole_counts, row_counts = users.new_empty((3, spans))
    list_own[(spans,)](
        part.blocks,
        part.row_spans,
        part.lo,
        part.hi,
        users,
        columns,
        column_blocks,
        counts,
        whole_counts,
        row_counts,
        num_columns,
        rows,
        *part.lo.stride(),
        *part.hi.stride(),
        BLOCK_SIZE=block_size,
        COLUMNS=COLUMNS,
        STEP=STEP,
        num_warps=4,
    )
    count = most_tiles(rows, spans, rows_per_tile)
    order = users.new_full((count * rows_per_tile,), -1)
    place, tile_spans, offsets = users.new_empty(rows), users.new_empty(count), users.new_empty(count + 1)
    place_own[(-(-rows // TAKEN),)](
        part.row_spans,
        counts,
        row_counts,
        order,
        place,
        tile_spans,
        offsets,
        spans,
        rows,
        count,
        ROWS=rows_per_tile,
        TAKEN=TAKEN,
        STEP=STEP,
        num_warps=4,
    )
    return SharedTiles(order, place, columns, column_blocks, whole_counts, offsets), tile_spans
