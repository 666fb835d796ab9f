"""Checks the tensors of Unified Attention without reading their values."""

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec, PerHead

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CACHED = (*_FLOATS, torch.float8_e4m3fn)


def validate(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor | None
) -> None:
    """Raises ValueError for shapes, dtypes or devices that do not match. Formats a message only if a check fails."""
    for name, tensor, dims in (
        ("query", query, 3),
        ("key", key, 3),
        ("value", value, 3),
        ("key_cache", key_cache, 4),
        ("value_cache", value_cache, 4),
    ):
        same(name, "dimensions", tensor.dim(), dims)
        same(name, "device", tensor.device, query.device)
    rows, heads, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"unified_attention: query has {heads} heads, expected a multiple of the {kv_heads} kv heads")
    same("key", "shape", tuple(key.shape), (rows, kv_heads, dim))
    same("value", "shape", tuple(value.shape), (rows, kv_heads, value_dim))
    same("key_cache", "shape", tuple(key_cache.shape), (*value_cache.shape[:2], kv_heads, dim))
    same("value_cache", "shape", tuple(value_cache.shape), (*key_cache.shape[:2], kv_heads, value_dim))
    same("key", "dtype", key.dtype, query.dtype)
    same("value", "dtype", value.dtype, query.dtype)
    same("value_cache", "dtype", value_cache.dtype, key_cache.dtype)
    for name, tensor, dtypes in (("query", query, _FLOATS), ("key_cache", key_cache, _CACHED)):
        if tensor.dtype not in dtypes:
            raise ValueError(f"unified_attention: {name} has dtype {tensor.dtype}, expected one of {dtypes}")
    if out is not None:
        same("out", "shape", tuple(out.shape), (rows, heads, value_dim))
        same("out", "dtype", out.dtype, query.dtype)
        same("out", "device", out.device, query.device)


def validate_selected(query: Tensor, parts: AttentionParts, blocks: Tensor | None) -> None:
    """Raises ValueError unless the selection of a layer and the rows of the query match the selected part."""
    if parts.selected is None:
        if blocks is not None:
            raise ValueError("unified_attention: selected_blocks are given, expected None without a selected part")
        return
    if parts.selected.max_rows < 1:
        raise ValueError(
            f"unified_attention: parts.selected.max_rows is {parts.selected.max_rows}, expected at least 1"
        )
    count, spans = tuple(parts.selected.blocks.shape)[:1], tuple(parts.selected.first_rows.shape)[:1]
    for name, tensor, shape in (
        ("selected_blocks", blocks, count),
        ("parts.selected.blocks", parts.selected.blocks, count),
        ("parts.selected.spans", parts.selected.spans, count),
        ("parts.selected.hi", parts.selected.hi, count),
        ("parts.selected.first_rows", parts.selected.first_rows, spans),
        ("parts.selected.num_rows", parts.selected.num_rows, spans),
    ):
        if tensor is not None:
            same(name, "shape", tuple(tensor.shape), shape)
            same(name, "dtype", tensor.dtype, torch.int64)
            same(name, "device", tensor.device, query.device)


def validate_spec(query: Tensor, parts: AttentionParts, spec: AttentionSpec, per_head: PerHead) -> None:
    """Raises ValueError unless the parts and the per-head values of a layer match its specification."""
    if parts.are_local and not (spec.is_local or spec.has_slopes):
        raise ValueError(f"unified_attention: found the parts of a window, expected spec.is_local, got {spec}")
    if parts.selected is not None and (spec.is_local or spec.has_slopes):
        raise ValueError(f"unified_attention: found a selected part with {spec}, expected none: it has no positions")
    if spec.has_slopes and parts.positions is None:
        raise ValueError(f"unified_attention: parts.positions is None, expected positions for {spec}")
    for name, given, tensor in (
        ("sinks", spec.has_sinks, per_head.sinks),
        ("slopes", spec.has_slopes, per_head.slopes),
    ):
        if given is (tensor is None):
            raise ValueError(f"unified_attention: per_head.{name} is {tensor}, but spec.has_{name} is {given}")
        if tensor is not None:
            same(f"per_head.{name}", "shape", tuple(tensor.shape), (query.shape[1],))
            same(f"per_head.{name}", "dtype", tensor.dtype, torch.float32)
            same(f"per_head.{name}", "device", tensor.device, query.device)


def same(name: str, what: str, found: object, expected: object) -> None:
    """Raises ValueError unless found equals expected."""
    if found != expected:
        raise ValueError(f"unified_attention: {name} has {what} {found}, expected {expected}")
