"""Merges the partial results of the parts, and allocates what they leave for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.early_start import follows
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import CudaPlan, merges_early
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.merge import merge_parts
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Found, scratch

# Heads per program, and pieces of a row that are read at once. With few rows, many programs hold pieces of each, and
# reading one piece after the other is slow (H200, one request of 2560 tokens: 0.023 -> 0.009 ms).
FEW_ROWS, OF_FEW, OF_MANY = 16, (1, 32), (4, 8)
# If this many rows belong to requests with several rows, each row has few pieces (H200, 64 verifications of 4 rows
# 0.176 -> 0.132 ms).
MANY_ROWS, OF_SEVERAL = 128, (8, 1)

NO_LISTS: tuple[Any, ...] = (None, None, None, None, None, 0, 0, 1)


def lists_of(one: Found) -> tuple[Any, ...]:
    """Returns lists as arguments of kernels."""
    return one.place, one.acc, one.top, one.total, one.offsets, one.offsets.shape[0] - 1, one.programs, one.units


def merge(
    layer: Layer,
    plan: CudaPlan,
    found: Sequence[Found],
    alone: bool,
    continued: bool = False,
    log_sums: Tensor | None = None,
) -> None:
    """Adds the partial results of each row; rows with only a causal part are complete already.

    alone: the step has one part, whose kernel is the last one on this stream. continued: the causal part includes the
        partial results of own blocks. log_sums: fp32 [rows, heads], written if there is no causal part.
    """
    by_part = {one.part: one for one in found}
    arguments: list[Any] = []
    for name in ("unique", "shared", "selected", "own"):
        one = by_part.get(name)
        arguments += NO_LISTS if one is None else lists_of(one)
    sums = saved_sums(layer, plan, [one for one in found if not (continued and one.part == "own")])
    several = plan.starts is not None and layer.rows >= MANY_ROWS
    heads, pieces = OF_FEW if layer.rows <= FEW_ROWS else OF_SEVERAL if several else OF_MANY
    early = alone and merges_early(layer, found[0].programs)
    block_h = min(heads, 1 << (layer.heads - 1).bit_length())
    merge_parts[(layer.rows, -(-layer.heads // block_h))](
        layer.out,
        log_sums,
        plan.starts,
        *(sums or (None, None, None)),
        *arguments,
        layer.sinks,
        *layer.out.stride()[:2],
        HEADS=layer.heads,
        S_ROWS=by_part["shared"].rows if "shared" in by_part else 1,
        C_ROWS=by_part["selected"].rows if "selected" in by_part else 1,
        W_ROWS=by_part["own"].rows if "own" in by_part else 1,
        VALUE_DIM=layer.value_dim,
        BLOCK_H=block_h,
        BLOCK_V=power_of_two(layer.value_dim),
        CAUSAL=plan.starts is not None,
        SAVED=sums is not None,
        UNIQUE="unique" in by_part,
        SHARED="shared" in by_part,
        SELECTED="selected" in by_part,
        OWN="own" in by_part,
        CONTINUED=continued,
        PIECES=pieces,
        **{"EARLY": early, "LOGS": log_sums is not None, "SINKS": layer.sinks is not None},
        **follows(early),
        num_warps=4,
    )


Sums = tuple[Tensor, Tensor, Tensor]


def saved_sums(layer: Layer, plan: CudaPlan, others: Sequence[Found]) -> Sums | None:
    """Returns scratch memory for the sums of rows with cached blocks: acc, top, total. None if there cannot be such
        rows.

    Unique blocks belong to single rows, which have no causal part.
    """
    if plan.starts is None or all(one.part == "unique" for one in others):
        return None
    size = layer.rows * layer.heads
    acc = scratch(layer, plan, "causal acc", size * layer.value_dim)
    return acc, scratch(layer, plan, "causal top", size), scratch(layer, plan, "causal total", size)


def rows_with_more(others: Sequence[Found]) -> Tensor:
    """Marks rows that have a place in a list: int32 [rows]."""
    return torch.stack([one.place >= 0 for one in others]).any(0).int()
