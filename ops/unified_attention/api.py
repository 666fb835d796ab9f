"""Unified Attention of one layer: validates the tensors of a step, chooses the implementation and calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

# Modules are imported on first use: an implementation may need packages that this machine does not have.
IMPLEMENTATIONS = ("reference", "cpu", "native")
_ON_CPU_ONLY = ("cpu", "native")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """The parts of a step and what an implementation derived from them; valid for all layers of that step.

    checked: the shapes and dtypes of tensors that passed validation; a step's layers are mostly alike.
    """

    parts: AttentionParts
    block_size: int
    implementation: str
    plan: Any
    checked: set[tuple[object, ...]] = field(default_factory=set, compare=False)


def prepare(parts: AttentionParts, block_size: int, *, implementation: str = "auto") -> PreparedParts:
    """Derives once per step what depends on the parts alone; pass the result to `unified_attention` of every layer.

    Worth it on CPU, where `cpu` and `native` read the parts on the host to form their calls. The parts' tensors must
    not change while the result is in use. For `reference` nothing is derived, so it may be called while capturing.
    """
    name = choose_implementation(implementation, _device_type(parts))
    # loaded here in any case: an import in a layer would break a compiled graph
    module = _load(name)
    plan = module.plan(parts, block_size) if name != "reference" else None
    return PreparedParts(parts, block_size, name, plan)


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parts: AttentionParts | PreparedParts,
    scale: float,
    out: Tensor | None = None,
    *,
    implementation: str = "auto",
    selected_blocks: Tensor | None = None,
) -> Tensor:
    """Attention of the step's flat batch over its new tokens and its cached blocks.

    query: [rows, heads, dim]; key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim]: the new tokens. They must
        be in the cache already (`ops.kv_cache.write_kv`): single rows read their own token from there.
    key_cache: [blocks, block_size, kv_heads, dim], value_cache: [blocks, block_size, kv_heads, value_dim]; may be
        strided views and of another float dtype than the query.
    parts: who sees what; `prepare(parts, block_size)` saves work when many layers use the same parts.
    out: [rows, heads, value_dim] in the query's dtype, or None to allocate; every element is written.
    implementation: `reference`, `cpu`, `native`, or `auto`: for CPU tensors outside of torch.compile `native` where its
        kernels could be built and else `cpu`; `reference` otherwise. With prepared parts it is the one they were
        prepared for.
    selected_blocks: int64 [selected], this layer's choice in place of `parts.selected.blocks`.

    Returns out. A row that sees nothing is zeros; one that sees a NaN key or value is NaN; nothing else reaches a row.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate_once(query, key, value, key_cache, value_cache, parts, out)
    if isinstance(parts, AttentionParts):
        implementation = choose_implementation(implementation, query.device.type)
        if implementation != "reference":
            parts = prepare(parts, key_cache.shape[1], implementation=implementation)
    if out is None:
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[-1]))
    if isinstance(parts, PreparedParts):
        _same("key_cache", "block size", key_cache.shape[1], parts.block_size)
        if parts.implementation != "reference":
            fast = _load(parts.implementation).attend
            # An implementation answers False when only the reference is exact for these tensors.
            if fast(query, key, value, key_cache, value_cache, parts.plan, scale, out):
                return out
        parts = parts.parts
    return _load("reference").attend(query, key, value, key_cache, value_cache, parts, scale, out)


def choose_implementation(implementation: str, device_type: str) -> str:
    """The implementation that runs on this type of device, `auto` resolved; ValueError for one that cannot."""
    if implementation == "auto":
        # The others read the parts on the host, which torch.compile cannot trace.
        if device_type != "cpu" or torch.compiler.is_compiling():
            return "reference"
        return "native" if native() is not None else "cpu"
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"unified_attention: implementation {implementation!r} is unknown, choose one of {known}")
    if implementation in _ON_CPU_ONLY and device_type != "cpu":
        raise ValueError(
            f"unified_attention: implementation {implementation!r} got tensors on {device_type}, "
            "choose 'auto' or 'reference'"
        )
    if implementation == "native" and native() is None:
        raise ValueError(
            f"unified_attention: implementation 'native' cannot be used here ({why_not_native()}), "
            "choose 'auto' or 'cpu'"
        )
    return implementation


_loaded: dict[str, ModuleType] = {}


def _load(name: str) -> ModuleType:
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = import_module(f"vllm_gaudi_ucm.ops.unified_attention.impl.{name}")
    return module


def _device_type(parts: AttentionParts) -> str:
    """Where the parts live; a step without any part has no tensor to ask and nothing to attend to."""
    if parts.causal is not None:
        return parts.causal.groups.device.type
    if parts.shared is not None:
        return parts.shared.blocks.device.type
    return parts.unique.rows.device.type if parts.unique is not None else "cpu"


def _validate_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parts: AttentionParts | PreparedParts,
    out: Tensor | None,
) -> None:
    """Validates, unless a layer of the same step with tensors of the same kind was."""
    if not isinstance(parts, PreparedParts):
        _validate(query, key, value, key_cache, value_cache, out)
        return
    tensors = (query, key, value, key_cache, value_cache, query if out is None else out)
    kind = (out is None, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors))
    if kind not in parts.checked:
        _validate(query, key, value, key_cache, value_cache, out)
        parts.checked.add(kind)


def _validate(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor | None
) -> None:
    """Everything that can be checked without reading a tensor. Messages are formatted only when a check fails."""
    for name, tensor, dims in (
        ("query", query, 3),
        ("key", key, 3),
        ("value", value, 3),
        ("key_cache", key_cache, 4),
        ("value_cache", value_cache, 4),
    ):
        _same(name, "dimensions", tensor.dim(), dims)
        _same(name, "device", tensor.device, query.device)
    rows, heads, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"unified_attention: query has {heads} heads, expected a multiple of the {kv_heads} kv heads")
    _same("key", "shape", tuple(key.shape), (rows, kv_heads, dim))
    _same("value", "shape", tuple(value.shape), (rows, kv_heads, value_dim))
    _same("key_cache", "shape", tuple(key_cache.shape), (*value_cache.shape[:2], kv_heads, dim))
    _same("value_cache", "shape", tuple(value_cache.shape), (*key_cache.shape[:2], kv_heads, value_dim))
    _same("key", "dtype", key.dtype, query.dtype)
    _same("value", "dtype", value.dtype, query.dtype)
    _same("value_cache", "dtype", value_cache.dtype, key_cache.dtype)
    for name, tensor in (("query", query), ("key_cache", key_cache)):
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"unified_attention: {name} has dtype {tensor.dtype}, expected one of {_FLOATS}")
    if out is not None:
        _same("out", "shape", tuple(out.shape), (rows, heads, value_dim))
        _same("out", "dtype", out.dtype, query.dtype)
        _same("out", "device", out.device, query.device)


def _same(name: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"unified_attention: {name} has {what} {found}, expected {expected}")
