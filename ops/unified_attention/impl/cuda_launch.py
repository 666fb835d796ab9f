"""Launches the CUDA kernels of Unified Attention: grids, scratch and tile sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_gaudi_ucm.ops.unified_attention.impl import cuda_tiles
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, has_copy_engine, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import (
    Lists,
    Plan,
    Tiles,
    row_order,
    selected_place,
    unique_place,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal import attend_causal, find_bounds
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.merge import merge_parts
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.shared import attend_shared
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.spans import attend_spans
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.tiles import list_columns


MODE = 1
WS = False


class Found(NamedTuple):
    """What the programs of one part have found: acc, top, total of [programs + lists, rows, heads].

    place: int32 [rows] list * rows of a list + lane. offsets: int32 [lists + 1].
    """

    part: str
    place: Tensor
    acc: Tensor
    top: Tensor
    total: Tensor
    offsets: Tensor
    programs: int
    rows: int


def unique(layer: Layer, plan: Plan) -> Found:
    """The single rows with the blocks that only they use."""
    part, lists = plan.parts.unique, plan.unique
    assert part is not None
    assert lists is not None
    place = _place(plan, "unique", layer.rows)
    return _spans(layer, plan, "unique", place, lists, lists.blocks, 1, (None, None))


def selected(layer: Layer, plan: Plan, blocks: Tensor | None) -> Found:
    """The rows of each span with the blocks that were chosen for it; blocks: int64 [selected], the layer's own."""
    part, lists = plan.parts.selected, plan.selected
    assert part is not None
    assert lists is not None
    chosen = lists.blocks if blocks is None else blocks[lists.order]
    place = _place(plan, "selected", layer.rows)
    return _spans(layer, plan, "selected", place, lists, chosen, part.max_rows, (part.first_rows, part.num_rows))


def _spans(
    layer: Layer,
    plan: Plan,
    part: str,
    place: Tensor,
    lists: Lists,
    blocks: Tensor,
    rows: int,
    spans: tuple[Tensor | None, Tensor | None],
) -> Found:
    tile, programs = cuda_tiles.spans_tile(layer, rows), cuda_tiles.programs(layer, blocks.shape[0])
    found = _scratch(layer, plan, part, place, lists.offsets, programs, rows)
    attend_spans[(layer.kv_heads, programs)](
        layer.query,
        layer.key_cache,
        layer.value_cache,
        blocks,
        lists.lo,
        lists.hi,
        lists.offsets,
        *spans,
        found.acc,
        found.top,
        found.total,
        layer.scale,
        lists.count,
        *layer.query.stride()[:2],
        *layer.cache_strides(),
        **layer.sizes(),
        ROWS=rows,
        SINGLE=spans[0] is None,
        BLOCK_SIZE=plan.block_size,
        LISTS=power_of_two(lists.count),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return found


def shared(layer: Layer, plan: Plan) -> Found:
    """Tiles of rows with the shared blocks that they use."""
    part = plan.parts.shared
    assert part is not None
    tiles = _tiles(layer, plan)
    tile, programs = cuda_tiles.shared_tile(layer), cuda_tiles.programs(layer, tiles.count * part.blocks.shape[0])
    found = _scratch(layer, plan, "shared", tiles.place, tiles.offsets, programs, tiles.rows_per_tile)
    attend_shared[(layer.kv_heads, programs)](
        layer.query,
        layer.key_cache,
        layer.value_cache,
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
        tiles.count,
        part.blocks.shape[0],
        *part.lo.stride(),
        *part.hi.stride(),
        *layer.query.stride()[:2],
        *layer.cache_strides(),
        **layer.sizes(),
        ROWS=tiles.rows_per_tile,
        BLOCK_SIZE=plan.block_size,
        LISTS=power_of_two(tiles.count),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return found


def causal(layer: Layer, plan: Plan, found: list[Found]) -> None:
    """New tokens among themselves: finished in `out`, or to scratch for rows that also have cached blocks."""
    assert plan.starts is not None
    # unique blocks are of single rows, which take no part here
    saves = any(one.part != "unique" for one in found)
    acc, top, total = _causal_scratch(layer, plan) if saves else (None, None, None)
    tile = cuda_tiles.causal_tile(layer)
    key_tiles = _descriptor(layer.key, tile.block_n)
    value_tiles = _descriptor(layer.value, tile.block_n)
    described = key_tiles is not None and value_tiles is not None
    attend_causal[(-(-layer.rows // tile.block_m) * layer.heads,)](
        layer.query,
        layer.key,
        layer.value,
        key_tiles if described else None,
        value_tiles if described else None,
        plan.starts,
        _bounds(layer, plan, tile.block_m),
        _cached(layer, plan, found) if saves else None,
        layer.out,
        acc,
        top,
        total,
        layer.scale,
        layer.rows,
        *layer.query.stride()[:2],
        *layer.key.stride()[:2],
        *layer.value.stride()[:2],
        *layer.out.stride()[:2],
        **layer.sizes(),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DESCRIBED=described,
        ALONE=not found,
        SAVES=saves,
        STAGES=tile.stages,
        MODE=MODE,
        WS=WS,
        num_warps=tile.warps,
    )


def merge(layer: Layer, plan: Plan, found: list[Found]) -> None:
    """Adds up what all parts have found of each row; rows with a causal part alone are finished already."""
    by_part = {one.part: one for one in found}
    arguments: list[Any] = []
    for name in ("unique", "shared", "selected"):
        one = by_part.get(name)
        if one is None:
            arguments += [None, None, None, None, None, 0, 0]
        else:
            arguments += [one.place, one.acc, one.top, one.total, one.offsets, one.offsets.shape[0] - 1, one.programs]
    saved = (plan.scratch.get(f"causal {name}") for name in ("acc", "top", "total"))
    block_h = min(8, 1 << (layer.heads - 1).bit_length())
    merge_parts[(layer.rows, -(-layer.heads // block_h))](
        layer.out,
        plan.starts,
        *saved,
        *arguments,
        *layer.out.stride()[:2],
        HEADS=layer.heads,
        S_ROWS=by_part["shared"].rows if "shared" in by_part else 1,
        C_ROWS=by_part["selected"].rows if "selected" in by_part else 1,
        VALUE_DIM=layer.value_dim,
        BLOCK_H=block_h,
        BLOCK_V=power_of_two(layer.value_dim),
        CAUSAL=plan.starts is not None,
        SAVED=plan.starts is not None and len(by_part) > ("unique" in by_part),
        UNIQUE="unique" in by_part,
        SHARED="shared" in by_part,
        SELECTED="selected" in by_part,
        PIECES=4,
        num_warps=4,
    )


def shared_tiles(layer: Layer) -> int:
    """Tiles that the rows of a step are cut into for the shared part."""
    return -(-layer.rows // (cuda_tiles.shared_tile(layer).block_m // layer.group))


def _tiles(layer: Layer, plan: Plan) -> Tiles:
    part, rows_per_tile = plan.parts.shared, cuda_tiles.shared_tile(layer).block_m // layer.group
    assert part is not None
    tiles = plan.tiles.get(rows_per_tile)
    if tiles is not None:
        return tiles
    order, place = row_order(part, plan.block_size, layer.rows, rows_per_tile)
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
        BLOCK_SIZE=plan.block_size,
        ROWS=rows_per_tile,
        ROWS_PAD=1 << (rows_per_tile - 1).bit_length(),
        COLUMNS=min(128, power_of_two(num_columns)),
        num_warps=4,
    )
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    tiles = plan.tiles[rows_per_tile] = Tiles(
        order, place, columns, column_blocks, whole_counts, offsets, rows_per_tile
    )
    return tiles


def _descriptor(tokens: Tensor, block_n: int) -> TensorDescriptor | None:
    """Tiles [block_n, dim] of tokens [rows, kv_heads, dim] for the copy engine of a Hopper; None where it has no use."""
    rows, heads, dim = tokens.shape
    if not has_copy_engine(tokens.device) or dim != power_of_two(dim) or dim > 256 or tokens.stride(1) != dim:
        return None
    size = tokens.element_size()
    if tokens.data_ptr() % 16 or tokens.stride(0) * size % 16:
        return None
    return TensorDescriptor(tokens, [rows, heads * dim], [tokens.stride(0), 1], [block_n, dim])


def _place(plan: Plan, part: str, rows: int) -> Tensor:
    place = plan.places.get((part, rows))
    if place is None:
        if part == "unique":
            assert plan.parts.unique is not None
            place = unique_place(plan.parts.unique, rows)
        else:
            assert plan.parts.selected is not None
            place = selected_place(plan.parts.selected, rows)
        plan.places[part, rows] = place
    return place


def _bounds(layer: Layer, plan: Plan, block_m: int) -> Tensor:
    """int32 [tiles, 3], see `find_bounds`."""
    assert plan.starts is not None
    bounds = plan.places.get(("bounds", block_m))
    if bounds is None:
        tiles = -(-layer.rows // block_m)
        bounds = plan.places["bounds", block_m] = plan.starts.new_empty((tiles, 3))
        find_bounds[(tiles,)](plan.starts, bounds, layer.rows, BLOCK_M=block_m)
    return bounds


def _cached(layer: Layer, plan: Plan, found: list[Found]) -> Tensor:
    """int32 [rows]: whether a row has a place in a list."""
    cached = plan.places.get(("cached", layer.rows))
    if cached is None:
        has = [one.place >= 0 for one in found]
        cached = plan.places["cached", layer.rows] = torch.stack(has).any(0).int()
    return cached


def _scratch(layer: Layer, plan: Plan, part: str, place: Tensor, offsets: Tensor, programs: int, rows: int) -> Found:
    size = (programs + offsets.shape[0] - 1) * rows * layer.heads
    acc = _room(layer, plan, f"{part} acc", size * layer.value_dim)
    top, total = (_room(layer, plan, f"{part} {name}", size) for name in ("top", "total"))
    return Found(part, place, acc, top, total, offsets, programs, rows)


def _causal_scratch(layer: Layer, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    size = layer.rows * layer.heads
    acc = _room(layer, plan, "causal acc", size * layer.value_dim)
    return acc, _room(layer, plan, "causal top", size), _room(layer, plan, "causal total", size)


def _room(layer: Layer, plan: Plan, name: str, size: int) -> Tensor:
    """fp32, at least `size` elements, whose contents are any."""
    room = plan.scratch.get(name)
    if room is None or room.numel() < size:
        room = plan.scratch[name] = torch.empty(size, dtype=torch.float32, device=layer.query.device)
    return room
