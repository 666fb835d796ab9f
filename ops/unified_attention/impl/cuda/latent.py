"""Launches for layers whose values are the first elements of their keys: all query heads read one KV head.

Query heads are multiplied in groups, as if each group had a KV head of its own at the same address. New tokens leave
partial results like the other parts; all layers have the same merge. The other kernels do not fit: their tiles are
powers of two, so a key of 576 elements would take the room of 1024, and its value would be read a second time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.joined import joined_lists
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, lists_size, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.merge import merge
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import bounds_of, tiles_of
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import (
    CudaPlan,
    Lists,
    Tile,
    programs_of,
    selected_place,
    unique_place,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.latent import (
    attend_latent_causal,
    attend_latent_spans,
    attend_latent_tiles,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Found, Work, room_for, run_side_by_side, scratch
from vllm_gaudi_ucm.ops.unified_attention.parts import NOTHING_SEEN, AttentionParts, SelectedPart, SharedPart

LARGEST_VALUE, LARGEST_REST = 512, 128
# Rows times query heads of a program. For each it keeps a sum of 512 elements in registers.
MOST, MOST_WIDE = 64, 16
TOKENS, TOKENS_WIDE = 32, 16  # of a step of a loop
# Tiles of this many rows and heads are too small for products of warp groups, so fewer warps suffice (H200, 64 decodes
# of 16 heads at 8192: 0.256 -> 0.216 ms). For a single row, one program per multiprocessor loads more at a time (at
# 32768: 0.046 -> 0.030).
SMALL, TOKENS_OF_ONE = 16, 64


def why_not_latent(layer: Layer, plan: CudaPlan) -> str | None:
    """Returns why the kernels do not cover this layer; None if they do."""
    dim, value_dim = layer.query.shape[2], layer.value_dim
    tensors = (layer.query, layer.key, layer.key_cache, layer.out)
    if layer.kv_heads != 1:
        return f"{layer.kv_heads} KV heads whose keys hold their values, expected one"
    if value_dim > LARGEST_VALUE or not 0 < dim - value_dim <= LARGEST_REST:
        most = f"{LARGEST_VALUE} and {LARGEST_REST} more"
        return f"keys of {dim} elements with values of {value_dim}, expected up to {most}"
    if layer.cap or layer.sinks is not None or layer.slopes is not None or plan.parts.are_local:
        return "soft caps, sinks, slopes and windows of keys that hold their values"
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return "heads that are strided in memory"
    if layer.scale <= 0 or not math.isfinite(layer.scale):
        return f"scale {layer.scale / math.log2(math.e)}, expected a positive number"
    chosen = plan.parts.selected
    if chosen is not None and chosen.max_rows > (MOST_WIDE if layer.wide else MOST):
        return f"spans of {chosen.max_rows} rows, expected at most {MOST_WIDE if layer.wide else MOST}"
    return None


def attend_latent(layer: Layer, plan: CudaPlan, selected_blocks: Tensor | None, log_sums: Tensor | None) -> None:
    """Writes the attention of a layer for which `why_not_latent` is None to its `out`."""
    work = _work(layer, plan, selected_blocks)
    found = [one.found for one in work if one.found is not None]
    if not found:
        layer.out.zero_()
        if log_sums is not None:
            log_sums.fill_(NOTHING_SEEN)
        return
    run_side_by_side(work, layer.query.device)
    # new tokens are a list as the others, so the merge has no causal part
    merge(layer, replace(plan, starts=None), found, alone=False, log_sums=log_sums)


def attend_slots(query: Tensor, cache: Tensor, slots: Tensor, scale: float, out: Tensor) -> bool:
    """Writes attention of rows over slots of their own to `out` [rows, heads, value size]; False if not covered.

    query: [rows, heads, dim]. cache: [slots, dim]. slots: int64 [rows, chosen], -1 behind the last one of a row.
    """
    rows, count = slots.shape
    in_blocks = cache[:, None, None]
    values = in_blocks[..., : out.shape[2]]
    layer = Layer(query, in_blocks[:0, 0], values[:0, 0], in_blocks, values, out, scale / math.log(2))
    plan = CudaPlan(AttentionParts(), 1, None, None, None)
    if why_not_latent(layer, plan) is not None:
        return False
    seen, entries = (slots >= 0).int().flatten(), slots.flatten()
    number = torch.arange(rows + 1, dtype=torch.int32, device=slots.device)
    lists = Lists(entries, entries, torch.zeros_like(seen), seen, seen, number * count)
    place = torch.where(slots[:, 0] >= 0, number[:-1], -1)
    work = _spans(layer, plan, "unique", place, lists, entries, 1, (None, None), 1)
    assert work.found is not None, "of spans"
    work.launch()
    merge(layer, plan, [work.found], alone=False)
    return True


def _work(layer: Layer, plan: CudaPlan, selected_blocks: Tensor | None) -> list[Work]:
    parts, work = plan.parts, []
    if plan.joined:
        work.append(_unique_and_selected(layer, plan, selected_blocks))
    elif parts.unique is not None and plan.unique is not None and parts.unique.num_rows:
        work.append(_unique(layer, plan, plan.unique))
    if parts.shared is not None and parts.shared.blocks.numel():
        work.append(_shared(layer, plan, parts.shared))
    lists = plan.selected_lists()
    if parts.selected is not None and lists is not None:
        work.append(_selected(layer, plan, parts.selected, lists, selected_blocks))
    if plan.starts is not None:
        work.append(_causal(layer, plan, plan.starts))
    return work


def in_groups(layer: Layer, rows: int = 1) -> Layer:
    """The layer with a KV head for each group of query heads. rows: rows that a program should hold, if they fit."""
    most = max(1, (MOST_WIDE if layer.wide else MOST) // rows)
    group = max(size for size in range(1, min(layer.heads, most) + 1) if layer.heads % size == 0)
    shape = (-1, -1, layer.heads // group, -1)
    return replace(layer, key_cache=layer.key_cache.expand(shape), value_cache=layer.value_cache.expand(shape))


def _sizes(layer: Layer, rows: int) -> dict[str, Any]:
    """Returns the compile-time arguments. rows: rows of a program."""
    sizes = layer.sizes()
    del sizes["BLOCK_D"], sizes["CAP"]
    wide, block_m = layer.wide, power_of_two(rows * layer.group)
    if wide:
        tile = Tile(block_m, TOKENS_WIDE, 1, 8)
    elif layer.rows == 1 and block_m == SMALL:
        tile = Tile(block_m, TOKENS_OF_ONE, 2, 4)
    else:
        tile = Tile(block_m, TOKENS, 2, 4 if block_m == SMALL else 8)
    rest = power_of_two(layer.query.shape[2] - layer.value_dim)
    return {**sizes, **tile.sizes(), "BLOCK_R": rest, "ROWS": rows}


def _unique(layer: Layer, plan: CudaPlan, lists: Lists) -> Work:
    """Launches single rows with their blocks, or with their slots if the plan has a token table."""
    size, slots = plan.block_size, None if plan.tokens is None else layer.by_slot()
    if slots is not None and plan.tokens is not None:
        layer, lists, size = slots, plan.tokens, 1
    place = plan.kept(("unique place", layer.rows), lambda: unique_place(lists, layer.rows))
    return _spans(layer, plan, "unique", place, lists, lists.blocks, 1, (None, None), size)


def _selected(layer: Layer, plan: CudaPlan, part: SelectedPart, lists: Lists, blocks: Tensor | None) -> Work:
    chosen = lists.blocks if blocks is None else blocks[lists.order]
    place = plan.kept(("selected place", layer.rows), lambda: selected_place(part, layer.rows))
    spans = (part.first_rows, part.num_rows)
    return _spans(layer, plan, "selected", place, lists, chosen, part.max_rows, spans, plan.block_size)


def _unique_and_selected(layer: Layer, plan: CudaPlan, blocks: Tensor | None) -> Work:
    """See `cuda_joined`."""
    one, chosen = plan.parts.unique, plan.parts.selected
    assert one is not None, "joined"
    assert chosen is not None, "joined"
    both = joined_lists(plan, layer.rows)
    entries = both.blocks_with(chosen.blocks if blocks is None else blocks)
    place = plan.kept(("joined place", layer.rows), lambda: unique_place(both.lists, layer.rows))
    return _spans(layer, plan, "unique", place, both.lists, entries, 1, (None, None), plan.block_size)


def _spans(
    layer: Layer,
    plan: CudaPlan,
    part: str,
    place: Tensor,
    lists: Lists,
    blocks: Tensor,
    rows: int,
    spans: Sequence[Tensor | None],
    block_size: int,
) -> Work:
    """Launches spans. rows: the most rows of a span. spans: first row and number of rows of each; None if span i is row
    i.
    """
    layer = in_groups(layer, rows)
    sizes = _sizes(layer, rows)
    programs = programs_of(layer, blocks.shape[0], beside=sizes["BLOCK_N"] == TOKENS_OF_ONE)
    found = room_for(layer, plan, part, place, lists.offsets, programs, rows)

    def launch() -> None:
        attend_latent_spans[(layer.kv_heads, programs)](
            layer.query, layer.key_cache, blocks, lists.lo, lists.hi, lists.offsets, *spans,
            found.acc, found.top, found.total, layer.scale, lists.num_lists,
            *layer.query.stride()[:2], *layer.key_cache.stride()[:2], **sizes,
            SINGLE=spans[0] is None, BLOCK_SIZE=block_size, LISTS=lists_size(lists.num_lists),
        )  # fmt: skip

    return Work(launch, found)


def _shared(layer: Layer, plan: CudaPlan, part: SharedPart) -> Work:
    """Launches tiles of rows with the shared blocks that they use."""
    layer = in_groups(layer)
    rows = _rows_per_tile(layer)
    tiles = plan.kept(("tiles", rows), lambda: tiles_of(part, plan.block_size, layer.rows, rows))
    programs = programs_of(layer, tiles.num_tiles * part.blocks.shape[0])
    found = room_for(layer, plan, "shared", tiles.place, tiles.offsets, programs, rows)

    def launch() -> None:
        attend_latent_tiles[(layer.kv_heads, programs)](
            layer.query, layer.key_cache, tiles.order, part.row_spans, part.lo, part.hi, tiles.columns,
            tiles.column_blocks, tiles.whole_counts, tiles.offsets, found.acc, found.top, found.total, layer.scale,
            tiles.num_tiles, part.blocks.shape[0], *part.lo.stride(), *part.hi.stride(), *layer.query.stride()[:2],
            *layer.key_cache.stride()[:2], **_sizes(layer, rows), BLOCK_SIZE=plan.block_size,
            LISTS=lists_size(tiles.num_tiles),
        )  # fmt: skip

    return Work(launch, found)


def _causal(layer: Layer, plan: CudaPlan, starts: Tensor) -> Work:
    """Launches new tokens among themselves, in tiles of adjacent rows: a list of one entry for each tile."""
    layer = in_groups(layer)
    rows = _rows_per_tile(layer)
    count = -(-layer.rows // rows)
    bounds = plan.kept(("bounds", rows), lambda: bounds_of(starts, rows))
    place, offsets = plan.kept(("latent rows", layer.rows), lambda: _in_order(starts, count))
    size = count * rows * layer.heads
    acc = scratch(layer, plan, "own acc", size * layer.value_dim)
    top, total = (scratch(layer, plan, f"own {name}", size) for name in ("top", "total"))

    def launch() -> None:
        attend_latent_causal[(layer.kv_heads, count)](
            layer.query, layer.key, starts, bounds, acc, top, total, layer.scale, layer.rows,
            *layer.query.stride()[:2], layer.key.stride(0), **_sizes(layer, rows),
        )  # fmt: skip

    return Work(launch, Found("own", place, acc, top, total, offsets, 1, rows))


def _in_order(starts: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Returns the place of each row with a causal part, which is the row itself, and the offsets of the tiles."""
    row = torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)
    return torch.where(starts <= row, row, -1), torch.arange(tiles + 1, dtype=torch.int32, device=starts.device)


def _rows_per_tile(layer: Layer) -> int:
    """Returns the rows of a tile, a power of two, for a layer in groups of heads."""
    most = max(1, (MOST_WIDE if layer.wide else MOST) // layer.group)
    return 1 << most.bit_length() - 1
