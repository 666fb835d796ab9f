"""Launches the parts whose rows see the same blocks: the unique part, and the selected part."""

from __future__ import annotations

from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, lists_size
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Lists, Plan, selected_place, unique_place
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import flat_spans_tile, merges_early, programs_of, spans_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Work, room_for
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.rows import attend_rows
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.spans import attend_spans
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.spans_flat import attend_spans_flat
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart

# From so many single rows on, one loop over all entries is faster (H200, 256 requests of 512 tokens: 0.162 -> 0.157
# ms); of fewer rows it is slower, and so it is where spans are long (8 with 77 chosen blocks each: by a sixth).
MANY_SPANS = 64
# Up to so many tokens in all, a program per row and kv head that needs no merge is faster than many and one (H200, one
# request of 128 tokens 7.5 -> 4.5 us, of 256 7.6 -> 6.2, of 512 8.3 -> 9.9).
FINAL_TOKENS = 256


def unique(layer: Layer, plan: Plan, lists: Lists, beside: bool, alone: bool) -> Work:
    """The single rows with the blocks that only they use. beside: it leaves room for the shared part.

    alone: the step has no other part; then a few tokens go straight to the result.
    """
    if alone and lists.blocks.shape[0] * plan.block_size <= FINAL_TOKENS:
        return _finished(layer, plan, lists)
    place = plan.kept(("unique place", layer.rows), lambda: unique_place(lists, layer.rows))
    return _spans(layer, plan, "unique", place, lists, lists.blocks, 1, (None, None), beside)


def _finished(layer: Layer, plan: Plan, lists: Lists) -> Work:
    """All rows, each with all of its blocks at once."""
    sizes = {**layer.sizes(), **spans_tile(layer, 1).sizes(), "BLOCK_SIZE": plan.block_size}

    def launch() -> None:
        attend_rows[(layer.rows, layer.kv_heads)](
            layer.query, layer.key_cache, layer.value_cache, lists.blocks, lists.lo, lists.hi, lists.offsets,
            layer.out, layer.scale, lists.num_lists,
            *layer.query.stride()[:2], *layer.cache_strides(), *layer.out.stride()[:2], **sizes,
        )  # fmt: skip

    return Work(launch, None)


def selected(layer: Layer, plan: Plan, part: SelectedPart, lists: Lists, blocks: Tensor | None) -> Work:
    """The rows of each span with the blocks that were chosen for it; blocks: int64 [selected], the layer's own."""
    chosen = lists.blocks if blocks is None else blocks[lists.order]
    place = plan.kept(("selected place", layer.rows), lambda: selected_place(part, layer.rows))
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
    beside: bool = False,
) -> Work:
    """rows: of a span at most. spans: first row and number of rows of each; None: span i is row i."""
    many = spans[0] is None and lists.num_lists >= MANY_SPANS
    flat = flat_spans_tile(layer, plan.block_size, beside) if many else None
    tile = flat or spans_tile(layer, rows)
    programs = programs_of(layer, blocks.shape[0], beside, flat is not None)
    found = room_for(layer, plan, part, place, lists.offsets, programs, rows)
    tensors = (layer.query, layer.key_cache, layer.value_cache, blocks, lists.lo, lists.hi, lists.offsets)
    results = (found.acc, found.top, found.total, layer.scale, lists.num_lists)
    strides = (*layer.query.stride()[:2], *layer.cache_strides())
    sizes = {**layer.sizes(), **tile.sizes(), "BLOCK_SIZE": plan.block_size}
    general = {"ROWS": rows, "SINGLE": spans[0] is None, "LISTS": lists_size(lists.num_lists)}
    early = merges_early(layer, programs)

    def launch() -> None:
        grid = (layer.kv_heads, programs)
        if flat is not None:
            attend_spans_flat[grid](*tensors, lists.owners, *results, *strides, **sizes)
        else:
            attend_spans[grid](*tensors, *spans, *results, *strides, **sizes, **general, EARLY=early)

    return Work(launch, found)
