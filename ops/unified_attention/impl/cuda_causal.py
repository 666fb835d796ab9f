"""Launches the causal part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_descriptors import describe_tokens
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, follows, starts_early
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Plan
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import causal_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Found, Work, scratch
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal import attend_causal
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal_repair import repair_causal
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal_tiles import find_bounds

Sums = tuple[Tensor, Tensor, Tensor]
LOOKED_AT = 64  # pairs of a tile and a head that a program of the repair looks at


def causal(layer: Layer, plan: Plan, starts: Tensor, others: Sequence[Found]) -> Work:
    """New tokens among themselves: finished in `out`, or to scratch for rows that also have cached blocks.

    starts: int32 [rows], see Plan. others: where the other parts of the step leave what they find.
    """
    tile = causal_tile(layer)
    tiles = -(-layer.rows // tile.block_m)
    bounds = plan.kept(("bounds", tile.block_m), lambda: _bounds(starts, tile.block_m))
    sums = saved_sums(layer, plan, others)
    has_more = None if sums is None else plan.kept(("has more", layer.rows), lambda: _has_more(others))
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
    results = (has_more, broken, layer.out, *(sums or (None, None, None)))
    strides = [stride for tokens, _ in sides for stride in tokens.stride()[:2]]
    flags = {"ALONE": not others, "SAVES": sums is not None}
    early = starts_early(layer.query.device)
    sizes = {**layer.sizes(), **tile.sizes(), "EARLY": early}

    def launch() -> None:
        tensors = (layer.query, layer.key, layer.value)
        attend_causal[(tiles * layer.heads,)](
            *tensors, *described, starts, bounds, *results, layer.scale, layer.rows, *strides,
            **sizes, **flags, DESCRIBED=described[0] is not None,
        )  # fmt: skip
        once_more = {name: size for name, size in sizes.items() if name != "STAGES"}
        repair_causal[(-(-tiles * layer.heads // LOOKED_AT),)](
            *tensors, starts, bounds, *results, layer.scale, layer.rows, tiles, *strides,
            **once_more, **flags, **follows(early), LOOKED_AT=LOOKED_AT,
        )  # fmt: skip

    return Work(launch, None)


def saved_sums(layer: Layer, plan: Plan, others: Sequence[Found]) -> Sums | None:
    """Where the sums of rows with cached blocks are left: acc, top, total. None if such rows cannot be.

    Unique blocks are of single rows, which take no part here.
    """
    if plan.starts is None or all(one.part == "unique" for one in others):
        return None
    size = layer.rows * layer.heads
    acc = scratch(layer, plan, "causal acc", size * layer.value_dim)
    return acc, scratch(layer, plan, "causal top", size), scratch(layer, plan, "causal total", size)


def _has_more(others: Sequence[Found]) -> Tensor:
    """int32 [rows]: whether a row has a place in a list."""
    return torch.stack([one.place >= 0 for one in others]).any(0).int()


def _bounds(starts: Tensor, block_m: int) -> Tensor:
    """int32 [tiles, 3], see `find_bounds`."""
    tiles = -(-starts.shape[0] // block_m)
    bounds = starts.new_empty((tiles, 3))
    find_bounds[(tiles,)](starts, bounds, starts.shape[0], BLOCK_M=block_m)
    return bounds
