"""Requests with several rows under a window: their blocks in tiles of rows of one request.

Rows of a request see different tokens, so `own.py` does not take them, and tiles of the shared part hold rows of
several requests: no block is seen by all rows of the tile, so it is multiplied with all of them, masked, and not
prefetched. Here, all rows of a tile see all blocks of a window except the first and last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, multiprocessors, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.own import STEP, TAKEN, Division, most_tiles, own_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import MOST_LISTED, listed, tiled
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import (
    LARGE_STAGE,
    CudaPlan,
    Lists,
    SharedTiles,
    Tile,
    programs_of,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.own import place_own
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.shared import attend_shared
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.windows import attend_windows
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Work
from vllm_gaudi_ucm.ops.unified_attention.parts import SharedPart

# Measured by `make bench-attention ARGS="--device cuda --models --variants"`. One launch: up to this many rows of a
# step (0: never), and this many cached tokens of a request; any number if verifications alone fill the GPU.
ONE_LAUNCH_ROWS, ONE_LAUNCH_TOKENS = 512, 512
# Programs per multiprocessor that fill the GPU.
FILLED = 0.75
# Rows of a request in a tile, in steps of up to this many rows: a verification. A bucket does not tell how many rows
# its requests have, and a prompt chunk reads its blocks once for each tile.
VERIFIED, FEW_ROWS = 8, 128
# Whether tiles of verifications hold rows of one request if one launch is not used. Chunks of a prompt are faster in
# tiles of any rows.
BY_REQUEST = True
NEW = 32  # new tokens of a step of the loop over these


def window_tile(layer: Layer) -> Tile:
    """Returns the tile for the rows of a verification. As for single rows, reading takes the time."""
    if layer.huge:
        return own_tile(layer)
    block_m = max(power_of_two(layer.group), min(32 if layer.wide else 64, power_of_two(VERIFIED * layer.group)))
    return Tile(block_m, min(32 if layer.wide else 128, layer.tokens_per_tile(LARGE_STAGE)), 2, 4)


def fits_one_launch(layer: Layer, plan: CudaPlan) -> bool:
    """True if a program per tile and kv head that writes the result directly is faster than even shares and a merge."""
    part, unique = plan.parts.shared, plan.parts.unique
    if part is None or part.rise is None or plan.starts is None or part.most_of_span is None:
        return False
    other = plan.parts.selected is not None or plan.tokens is not None or layer.slopes is not None
    if other or layer.rows > ONE_LAUNCH_ROWS:
        return False
    most = part.most_of_span
    if unique is not None and plan.unique is not None:
        if unique.most_of_row is None:
            return False
        most = max(most, unique.most_of_row)
    tokens, requests = most * plan.block_size, min(layer.rows, part.hi.shape[0])
    fills = requests * layer.kv_heads >= FILLED * multiprocessors(layer.query.device)
    return tokens <= ONE_LAUNCH_TOKENS or (fills and layer.rows <= VERIFIED * requests)


def one_launch(layer: Layer, plan: CudaPlan, part: SharedPart) -> Work:
    """Computes all of a step in one launch: cached blocks, shared or not, single rows, new tokens, sinks. part: the
    shared part.
    """
    tile = window_tile(layer)
    rows_per_tile = tile.block_m // layer.group
    tiles = plan.kept(("windows", rows_per_tile), lambda: _all_rows(part, plan.block_size, layer.rows, rows_per_tile))
    singles = plan.unique
    lists = (None,) * 4 if singles is None else (singles.blocks, singles.lo, singles.hi, singles.offsets)
    fresh = (*layer.key.stride()[:2], *layer.value.stride()[:2])
    sizes = {**layer.sizes(), **tile.sizes(), "BLOCK_SIZE": plan.block_size, "ROWS": rows_per_tile, "NEW": NEW}

    def launch() -> None:
        attend_windows[(layer.kv_heads, tiles.num_tiles)](
            layer.query, layer.key, layer.value, layer.key_cache, layer.value_cache, tiles.order, part.row_spans,
            part.lo, part.hi, part.rise, tiles.columns, tiles.column_blocks, tiles.whole_counts, tiles.offsets,
            plan.starts, *lists, layer.out, layer.sinks, layer.scale, part.blocks.shape[0], _count(singles),
            *part.lo.stride(), *part.hi.stride(), *layer.query.stride()[:2], *fresh, *layer.cache_strides(),
            *layer.out.stride()[:2], **sizes, SINGLES=singles is not None, SINKS=layer.sinks is not None,
        )  # fmt: skip

    return Work(launch, None)


def takes_requests(layer: Layer, part: SharedPart) -> bool:
    """True if tiles hold rows of one request; False if their lists are too large."""
    tiles = most_tiles(layer.rows, part.hi.shape[0], window_tile(layer).block_m // layer.group)
    return BY_REQUEST and layer.rows <= FEW_ROWS and tiles * part.blocks.shape[0] <= MOST_LISTED


def by_request(layer: Layer, plan: CudaPlan, part: SharedPart, division: Division) -> Work:
    """Launches the rows of each request with its own blocks, like `own`. part: the whole shared part."""
    tile = window_tile(layer)
    rows_per_tile = tile.block_m // layer.group
    alone = plan.kept(("own of windows", 0), lambda: _alone(part, division))
    tiles = plan.kept(
        ("own of windows", rows_per_tile), lambda: _with_blocks(alone, plan.block_size, layer.rows, rows_per_tile)
    )
    programs = programs_of(layer, tiles.num_tiles * part.blocks.shape[0])
    return tiled(attend_shared, "own", layer, plan, alone, tile, tiles, alone.row_spans, programs)


def _count(lists: Lists | None) -> int:
    return 0 if lists is None else lists.num_lists


def _alone(part: SharedPart, division: Division) -> SharedPart:
    return part._replace(hi=torch.where(division.users == 1, part.hi, 0).int())


def _with_blocks(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> SharedTiles:
    """Returns the rows whose tiles have blocks."""
    tiles = _all_rows(part, block_size, rows, rows_per_tile)
    used = tiles.offsets[1:] > tiles.offsets[:-1]
    return tiles._replace(place=torch.where(used[tiles.place // rows_per_tile], tiles.place, -1))


def _all_rows(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> SharedTiles:
    """Makes tiles of rows of one span, wherever these are in the step; rows without a request are a span, too."""
    order, place = span_order(part.row_spans, part.hi.shape[0], rows, rows_per_tile)
    return listed(part, block_size, order, place, rows_per_tile)


def span_order(row_spans: Tensor, spans: int, rows: int, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """Returns `order` and `place` of SharedTiles."""
    ones = torch.ones(max(rows, spans), dtype=torch.int32, device=row_spans.device)
    row_counts = torch.zeros_like(ones[:spans]).index_add_(0, row_spans[:rows], ones[:rows])
    count = most_tiles(rows, spans, rows_per_tile)
    order, place = ones.new_full((count * rows_per_tile + rows,), -1).split((count * rows_per_tile, rows))
    tile_spans, offsets = ones.new_empty(count), ones.new_empty(count + 1)
    place_own[(-(-rows // TAKEN),)](
        row_spans,
        ones,
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
    return order, place
