"""Launches the parts whose rows see the same blocks: the unique part, and the selected part."""

from __future__ import annotations

from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, lists_size
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Lists, Plan, selected_place, unique_place
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import programs_of, spans_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Work, room_for
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.spans import attend_spans
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart


def unique(layer: Layer, plan: Plan, lists: Lists) -> Work:
    """The single rows with the blocks that only they use."""
    place = plan.kept(("unique place", layer.rows), lambda: unique_place(lists, layer.rows))
    return _spans(layer, plan, "unique", place, lists, lists.blocks, 1, (None, None))


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
) -> Work:
    """rows: of a span at most. spans: first row and number of rows of each; None: span i is row i."""
    tile = spans_tile(layer, rows)
    programs = programs_of(layer, blocks.shape[0])
    found = room_for(layer, plan, part, place, lists.offsets, programs, rows)

    def launch() -> None:
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
            lists.num_lists,
            *layer.query.stride()[:2],
            *layer.cache_strides(),
            **layer.sizes(),
            **tile.sizes(),
            ROWS=rows,
            SINGLE=spans[0] is None,
            BLOCK_SIZE=plan.block_size,
            LISTS=lists_size(lists.num_lists),
        )

    return Work(launch, found)
