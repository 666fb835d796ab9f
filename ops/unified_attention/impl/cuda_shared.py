"""Launches the shared part, and lists per tile of rows the blocks that it uses."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_descriptors import describe_cache
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, lists_size
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Plan, Tiles, row_order
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import programs_of, shared_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Work, room_for
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.shared import attend_shared
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.tiles import list_columns
from vllm_gaudi_ucm.ops.unified_attention.parts import SharedPart

COLUMNS = 128  # shared blocks that a program looks at in one step


def shared(layer: Layer, plan: Plan, part: SharedPart, beside: bool) -> Work:
    """Tiles of rows with the shared blocks that they use. beside: the step has other parts that read the cache."""
    tile = shared_tile(layer)
    rows_per_tile = tile.block_m // layer.group
    tiles = plan.kept(("tiles", rows_per_tile), lambda: _tiles(part, plan.block_size, layer.rows, rows_per_tile))
    programs = programs_of(layer, tiles.num_tiles * part.blocks.shape[0], beside)
    found = room_for(layer, plan, "shared", tiles.place, tiles.offsets, programs, rows_per_tile)
    key_tiles, value_tiles = (describe_cache(cache, tile.block_n) for cache in (layer.key_cache, layer.value_cache))
    described = key_tiles is not None and value_tiles is not None

    def launch() -> None:
        attend_shared[(layer.kv_heads, programs)](
            layer.query,
            layer.key_cache,
            layer.value_cache,
            key_tiles if described else None,
            value_tiles if described else None,
            tiles.order,
            part.row_spans,
            part.lo,
            part.hi,
            tiles.columns,
            tiles.column_blocks,
            tiles.whole_counts,
            tiles.offsets,
            found.acc,
            found.top,
            found.total,
            layer.scale,
            tiles.num_tiles,
            part.blocks.shape[0],
            *part.lo.stride(),
            *part.hi.stride(),
            *layer.query.stride()[:2],
            *layer.cache_strides(),
            **layer.sizes(),
            **tile.sizes(),
            ROWS=rows_per_tile,
            BLOCK_SIZE=plan.block_size,
            LISTS=lists_size(tiles.num_tiles),
            DESCRIBED=described,
        )

    return Work(launch, found)


def listed_pairs(layer: Layer, part: SharedPart | None) -> int:
    """Pairs of a tile of rows and a shared block: the size of the lists."""
    if part is None:
        return 0
    return -(-layer.rows // (shared_tile(layer).block_m // layer.group)) * part.blocks.shape[0]


def _tiles(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> Tiles:
    order, place = row_order(part, block_size, rows, rows_per_tile)
    count, num_columns = order.shape[0] // rows_per_tile, part.blocks.shape[0]
    columns, column_blocks = order.new_empty((2, count, num_columns))
    counts, whole_counts = order.new_empty((2, count))
    list_columns[(count,)](
        order,
        part.row_spans,
        part.blocks,
        part.lo,
        part.hi,
        columns,
        column_blocks,
        counts,
        whole_counts,
        num_columns,
        *part.lo.stride(),
        *part.hi.stride(),
        BLOCK_SIZE=block_size,
        ROWS=rows_per_tile,
        ROWS_PAD=1 << (rows_per_tile - 1).bit_length(),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return Tiles(order, place, columns, column_blocks, whole_counts, offsets)
