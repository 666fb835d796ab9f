"""Launches the merge of what all parts have found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_causal import saved_sums
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, follows, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Plan
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import merges_early
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Found
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.merge import merge_parts

# Heads per program, and pieces of a row that are read at once. Of few rows, many programs hold pieces of each, and one
# piece after the other is slow (H200, one request of 2560 tokens: 0.023 -> 0.009 ms).
FEW_ROWS, OF_FEW, OF_MANY = 16, (1, 32), (4, 8)


def merge(layer: Layer, plan: Plan, found: Sequence[Found], alone: bool) -> None:
    """Adds up what has been found of each row; rows that have a causal part alone are finished already.

    alone: the step has one part, whose kernel is the last one on this stream.
    """
    by_part = {one.part: one for one in found}
    arguments: list[Any] = []
    for name in ("unique", "shared", "selected"):
        one = by_part.get(name)
        if one is None:
            arguments += [None, None, None, None, None, 0, 0]
        else:
            arguments += [one.place, one.acc, one.top, one.total, one.offsets, one.offsets.shape[0] - 1, one.programs]
    sums = saved_sums(layer, plan, found)
    heads, pieces = OF_FEW if layer.rows <= FEW_ROWS else OF_MANY
    early = alone and merges_early(layer, found[0].programs)
    block_h = min(heads, 1 << (layer.heads - 1).bit_length())
    merge_parts[(layer.rows, -(-layer.heads // block_h))](
        layer.out,
        plan.starts,
        *(sums or (None, None, None)),
        *arguments,
        *layer.out.stride()[:2],
        HEADS=layer.heads,
        S_ROWS=by_part["shared"].rows if "shared" in by_part else 1,
        C_ROWS=by_part["selected"].rows if "selected" in by_part else 1,
        VALUE_DIM=layer.value_dim,
        BLOCK_H=block_h,
        BLOCK_V=power_of_two(layer.value_dim),
        CAUSAL=plan.starts is not None,
        SAVED=sums is not None,
        UNIQUE="unique" in by_part,
        SHARED="shared" in by_part,
        SELECTED="selected" in by_part,
        PIECES=pieces,
        EARLY=early,
        **follows(early),
        num_warps=4,
    )
