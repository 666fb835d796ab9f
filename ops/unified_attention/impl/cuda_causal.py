"""Launches the causal part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import LARGEST_HEAD, Layer, has_copy_engine, power_of_two
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Plan
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_tiles import causal_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_work import Found, Work, scratch
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal import attend_causal, find_bounds

Sums = tuple[Tensor, Tensor, Tensor]


def causal(layer: Layer, plan: Plan, starts: Tensor, others: Sequence[Found]) -> Work:
    """New tokens among themselves: finished in `out`, or to scratch for rows that also have cached blocks.

    starts: int32 [rows], see Plan. others: where the other parts of the step leave what they find.
    """
    tile = causal_tile(layer)
    tiles = -(-layer.rows // tile.block_m)
    bounds = plan.kept(("bounds", tile.block_m), lambda: _bounds(starts, tile.block_m))
    sums = saved_sums(layer, plan, others)
    has_more = None if sums is None else plan.kept(("has more", layer.rows), lambda: _has_more(others))
    key_tiles, value_tiles = (_descriptor(tokens, tile.block_n) for tokens in (layer.key, layer.value))
    described = key_tiles is not None and value_tiles is not None

    def launch() -> None:
        attend_causal[(tiles * layer.heads,)](
            layer.query,
            layer.key,
            layer.value,
            key_tiles if described else None,
            value_tiles if described else None,
            starts,
            bounds,
            has_more,
            layer.out,
            *(sums or (None, None, None)),
            layer.scale,
            layer.rows,
            *layer.query.stride()[:2],
            *layer.key.stride()[:2],
            *layer.value.stride()[:2],
            *layer.out.stride()[:2],
            **layer.sizes(),
            **tile.sizes(),
            DESCRIBED=described,
            ALONE=not others,
            SAVES=sums is not None,
        )

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


def _descriptor(tokens: Tensor, block_n: int) -> TensorDescriptor | None:
    """Tiles [block_n, dim] of tokens [rows, kv_heads, dim] for a Hopper's copy engine; None where it cannot be used."""
    rows, heads, dim = tokens.shape
    if not has_copy_engine(tokens.device) or dim != power_of_two(dim) or dim > LARGEST_HEAD or tokens.stride(1) != dim:
        return None
    if tokens.data_ptr() % 16 or tokens.stride(0) * tokens.element_size() % 16:
        return None
    return TensorDescriptor(tokens, [rows, heads * dim], [tokens.stride(0), 1], [block_n, dim])
