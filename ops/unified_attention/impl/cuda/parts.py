"""Launches the kernels of each part, and the merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.early_start import follows, starts_early
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.joined import joined_lists
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import (
    Layer,
    describe_cache,
    describe_tokens,
    lists_size,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.merge import NO_LISTS, lists_of, rows_with_more, saved_sums
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import (
    CudaPlan,
    Lists,
    SharedTiles,
    Tile,
    causal_tile,
    flat_spans_tile,
    merges_early,
    of_few_blocks,
    programs_of,
    row_order,
    selected_place,
    shared_tile,
    spans_tile,
    unique_place,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.short import finished, is_short
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.causal import attend_causal, find_bounds, repair_causal
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.shared import attend_shared
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import list_columns
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.unique import attend_spans, attend_spans_flat
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Found, Work, room_for
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, SharedPart

LOOKED_AT = 64  # pairs of a tile and a head that a program of the repair examines
# Warps of a repair with 64 rows: too few for products of warp groups, for which ptxas used addresses that it never
# computed
REPAIR_WARPS = 2


def causal(layer: Layer, plan: CudaPlan, starts: Tensor, others: Sequence[Found], before: Found | None = None) -> Work:
    """Launches new tokens among themselves. Results go to `out`, or to scratch for rows that also have cached blocks.

    starts: int32 [rows], see CudaPlan. others: the partial results of the other parts of the step. before: the results
        of own blocks, which its sums include; they are not among the others, and were launched on this stream.
    """
    tile = causal_tile(layer)
    tiles = -(-layer.rows // tile.block_m)
    bounds = plan.kept(("bounds", tile.block_m), lambda: bounds_of(starts, tile.block_m))
    sums = saved_sums(layer, plan, others)
    has_more = None if sums is None else plan.kept(("has more", layer.rows), lambda: rows_with_more(others))
    broken = plan.kept(("broken", tiles * layer.heads), lambda: starts.new_zeros(tiles * layer.heads))
    sides = (
        (layer.query, tile.block_m),
        (layer.key, tile.block_n),
        (layer.value, tile.block_n),
        (layer.out, tile.block_m),
    )
    described = [describe_tokens(tokens, size) for tokens, size in sides]
    if None in described:
        described = [None] * 4
    # entries of own blocks are not divided
    own = (NO_LISTS if before is None else lists_of(before))[:-1]
    results = (has_more, broken, layer.out, *(sums or (None, None, None)), *own)
    strides = [stride for tokens, _ in sides for stride in tokens.stride()[:2]]
    flags: dict[str, int] = {"ALONE": not others and before is None, "SAVES": sums is not None}
    flags |= {"SINKS": layer.sinks is not None, "CONTINUES": before is not None, "SLOPES": layer.slopes is not None}
    flags["OWN_ROWS"] = 1 if before is None else before.rows
    early = starts_early(layer.query.device)
    sizes = {**layer.sizes(), **tile.sizes(), "EARLY": early}

    def launch() -> None:
        tensors = (layer.query, layer.key, layer.value)
        attend_causal[(tiles * layer.heads,)](
            *tensors, *described, starts, bounds, *results, layer.sinks, layer.slopes, layer.scale,
            layer.rows, *strides, **sizes, **flags, DESCRIBED=described[0] is not None,
        )  # fmt: skip
        once_more = {name: size for name, size in sizes.items() if name != "STAGES"}
        once_more["num_warps"] = tile.warps if tile.block_m < 64 else REPAIR_WARPS
        repair_causal[(-(-tiles * layer.heads // LOOKED_AT),)](
            *tensors, starts, bounds, *results, layer.sinks, layer.slopes, layer.scale,
            layer.rows, tiles, *strides, **once_more, **flags, **follows(early), LOOKED_AT=LOOKED_AT,
        )  # fmt: skip

    return Work(launch, None)


def bounds_of(starts: Tensor, block_m: int) -> Tensor:
    """int32 [tiles, 3], see `find_bounds`."""
    tiles = -(-starts.shape[0] // block_m)
    bounds = starts.new_empty((tiles, 3))
    find_bounds[(tiles,)](starts, bounds, starts.shape[0], BLOCK_M=block_m)
    return bounds


COLUMNS = 128  # shared blocks that a program examines in one step
MOST_LISTED = 1 << 27  # columns per tile of rows, int32 twice: longer lists would be larger than what they save


def shared(layer: Layer, plan: CudaPlan, part: SharedPart, beside: bool) -> Work:
    """Launches tiles of rows with the shared blocks that they use. beside: other parts of the step read the cache,
    too.
    """
    tile = shared_tile(layer, plan.starts is not None and not beside)
    rows_per_tile = tile.block_m // layer.group
    tiles = plan.kept(("tiles", rows_per_tile), lambda: tiles_of(part, plan.block_size, layer.rows, rows_per_tile))
    programs = programs_of(layer, tiles.num_tiles * part.blocks.shape[0], beside)
    return tiled(attend_shared, "shared", layer, plan, part, tile, tiles, part.row_spans, programs)


def tiled(
    kernel: Any,
    name: str,
    layer: Layer,
    plan: CudaPlan,
    part: SharedPart,
    tile: Tile,
    tiles: SharedTiles,
    spans: Tensor,
    programs: int,
) -> Work:
    """Launches tiles of rows with lists of shared blocks, by `attend_shared`, or by `attend_own`, whose arguments are
    the same.

    spans: arguments of the kernel in addition to `order`. programs: per kv head.
    """
    rows_per_tile = tile.block_m // layer.group
    found = room_for(layer, plan, name, tiles.place, tiles.offsets, programs, rows_per_tile)
    key_tiles, value_tiles = (describe_cache(cache, tile.block_n) for cache in (layer.key_cache, layer.value_cache))
    described = key_tiles is not None and value_tiles is not None
    # `attend_own` takes none
    more = (part.rise, layer.slopes, layer.positions) if kernel is attend_shared else ()
    flags = {"RISES": part.rise is not None, "SLOPES": layer.slopes is not None} if more else {}

    def launch() -> None:
        kernel[(layer.kv_heads, programs)](
            layer.query,
            layer.key_cache,
            layer.value_cache,
            key_tiles if described else None,
            value_tiles if described else None,
            tiles.order,
            spans,
            part.lo,
            part.hi,
            tiles.columns,
            tiles.column_blocks,
            tiles.whole_counts,
            tiles.offsets,
            found.acc,
            found.top,
            found.total,
            *more,
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
            **flags,
        )

    return Work(launch, found)


# Up to this many unique blocks for each pair of a tile of rows and a shared block, the two parts take about equally
# long, and each gets half of the GPU (H200, 64 decodes at 8192 shared and 512 own tokens: 0.081 -> 0.077 ms).
BALANCED = 2


def listed_pairs(layer: Layer, part: SharedPart | None) -> int:
    """Returns the number of pairs of a row tile and a shared block, which is the size of the lists."""
    if part is None:
        return 0
    return -(-layer.rows // (shared_tile(layer).block_m // layer.group)) * part.blocks.shape[0]


def tiles_of(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> SharedTiles:
    order, place = row_order(part, block_size, rows, rows_per_tile)
    return listed(part, block_size, order, place, rows_per_tile)


def listed(part: SharedPart, block_size: int, order: Tensor, place: Tensor, rows_per_tile: int) -> SharedTiles:
    """Launches tiles of rows, each with a list of the blocks that its rows see. order, place: see SharedTiles."""
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
        part.rise,
        num_columns,
        *part.lo.stride(),
        *part.hi.stride(),
        BLOCK_SIZE=block_size,
        ROWS=rows_per_tile,
        ROWS_PAD=1 << (rows_per_tile - 1).bit_length(),
        COLUMNS=COLUMNS,
        RISES=part.rise is not None,
        num_warps=4,
    )
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return SharedTiles(order, place, columns, column_blocks, whole_counts, offsets)


# From this many single rows, one loop over all entries is faster (H200, 256 requests of 512 tokens: 0.162 -> 0.157 ms);
# with fewer rows it is slower, and also with long spans (8 with 77 chosen blocks each: by a sixth).
MANY_SPANS = 64
# Never together with blocks of requests with several rows: a bucket counts more single rows than a step has, and this
# was the only launch that differed from the true shape's (H200, a chunk of 2048 after 30K, 63 decodes at 2K: 2.50 and
# 2.13 ms).
MANY_BESIDE = 1 << 30


def unique(layer: Layer, plan: CudaPlan, beside: bool, alone: bool) -> Work:
    """Launches the single rows with their unique blocks, or with their slots if the plan has a token table.

    beside: leaves room for the shared part. alone: the step has no other part; a short context then goes directly to
        the result.
    """
    lists, size = plan.unique, plan.block_size
    assert lists is not None, "a step without unique blocks has no such part"
    # slots have no positions, which slopes need
    slots = None if plan.tokens is None or layer.slopes is not None else layer.by_slot()
    if slots is not None and plan.tokens is not None:
        layer, lists, size = slots, plan.tokens, 1
    # a list of slots is as long as its row has tokens, a number that is not known
    of_row = 0 if size == 1 else size * (plan.most_of_row or 0)
    if alone and layer.slopes is None and is_short(layer, lists.blocks.shape[0] * size, of_row):
        return finished(layer, lists, size)
    place = plan.kept(("unique place", layer.rows), lambda: unique_place(lists, layer.rows))
    return _spans(layer, plan, "unique", place, lists, lists.blocks, 1, (None, None), beside, size)


def selected(layer: Layer, plan: CudaPlan, part: SelectedPart, lists: Lists, blocks: Tensor | None) -> Work:
    """Launches the rows of each span with its selected blocks. blocks: int64 [selected], chosen by the layer."""
    return selected_lists(layer, plan, part, lists, lists.blocks if blocks is None else blocks[lists.order])


def selected_lists(layer: Layer, plan: CudaPlan, part: SelectedPart, lists: Lists, blocks: Tensor) -> Work:
    """Launches the rows of each span with a list of blocks; blocks: int64 [entries]."""
    place = plan.kept(("selected place", layer.rows), lambda: selected_place(part, layer.rows))
    spans = part.first_rows, part.num_rows
    return _spans(layer, plan, "selected", place, lists, blocks, part.max_rows, spans, chosen=True)


def unique_and_selected(layer: Layer, plan: CudaPlan, blocks: Tensor | None) -> Work:
    """Launches the single rows with their unique blocks and the blocks chosen for them, as one list for each row.

    blocks: int64 [selected], chosen by the layer; None: the blocks of the part.
    """
    chosen = plan.parts.selected
    assert chosen is not None, "joined"
    both = joined_lists(plan, layer.rows)
    entries = both.blocks_with(chosen.blocks if blocks is None else blocks)
    place = plan.kept(("joined place", layer.rows), lambda: unique_place(both.lists, layer.rows))
    beside = entries.shape[0] <= BALANCED * listed_pairs(layer, plan.parts.shared)
    return _spans(layer, plan, "unique", place, both.lists, entries, 1, (None, None), beside, chosen=True)


def _spans(
    layer: Layer,
    plan: CudaPlan,
    part: str,
    place: Tensor,
    lists: Lists,
    blocks: Tensor,
    rows: int,
    spans: tuple[Tensor | None, Tensor | None],
    beside: bool = False,
    block_size: int | None = None,
    chosen: bool = False,
) -> Work:
    """Launches spans. rows: the most rows of a span. spans: first row and number of rows of each; None if span i is row
        i.

    chosen: blocks are a sparse method's choice, so they are few.
    """
    block_size = block_size or plan.block_size
    # or does a request with several rows read the cache, too?
    most = MANY_SPANS if plan.starts is None or plan.parts.shared is None else MANY_BESIDE
    many = spans[0] is None and lists.num_lists >= most and layer.slopes is None
    flat = flat_spans_tile(layer, block_size, beside) if many else None
    tile = flat or spans_tile(layer, rows)
    if chosen and flat is None:
        tile = of_few_blocks(tile, layer, blocks.shape[0], block_size)
    units = 1 if flat is not None or block_size % tile.block_n else block_size // tile.block_n
    programs = programs_of(layer, blocks.shape[0] * units, beside, flat is not None)
    found = room_for(layer, plan, part, place, lists.offsets, programs, rows)._replace(units=units)
    tensors = (layer.query, layer.key_cache, layer.value_cache, blocks, lists.lo, lists.hi, lists.offsets)
    results, slopes = (found.acc, found.top, found.total), (layer.slopes, layer.positions)
    strides = (layer.scale, lists.num_lists, *layer.query.stride()[:2], *layer.cache_strides())
    sizes = {**layer.sizes(), **tile.sizes(), "BLOCK_SIZE": block_size}
    general = {"ROWS": rows, "SINGLE": spans[0] is None, "LISTS": lists_size(lists.num_lists)}
    general |= {"SLOPES": layer.slopes is not None, "EARLY": merges_early(layer, programs)}
    general["UNITS"] = units

    def launch() -> None:
        grid = (layer.kv_heads, programs)
        if flat is not None:
            attend_spans_flat[grid](*tensors, lists.owners, *results, *strides, **sizes)
        else:
            attend_spans[grid](*tensors, *spans, *results, *slopes, *strides, **sizes, **general)

    return Work(launch, found)
