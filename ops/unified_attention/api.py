"""Unified Attention of one layer: validates the tensors of a step, chooses the implementation and calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.triton_support import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.validation import same, validate, validate_selected

# Modules are imported on first use: an implementation may need packages that this machine does not have.
IMPLEMENTATIONS = ("reference", "cpu", "native", "hpu", "cuda")
_ON_CPU_ONLY = ("cpu", "native")
# These read nothing on the host, so they may run while a graph is captured.
STATIC_IMPLEMENTATIONS = ("reference", "hpu", "cuda")


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
    not change while the result is in use. For `reference` and `hpu` nothing is derived, so it may be called while
    capturing.
    """
    name = choose_implementation(implementation, _device_type(parts, implementation))
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
    implementation: `reference`, `cpu`, `native`, `hpu` (which runs anywhere), or `auto`: for CPU tensors outside of
        torch.compile `native` where its kernels could be built and else `cpu`; `hpu` for Gaudi's; `reference`
        otherwise. With prepared parts it is the one they were prepared for.
    selected_blocks: int64 [selected], this layer's choice in place of `parts.selected.blocks`; only with that part.

    Returns out. A row that sees nothing is zeros; one that sees a key or value with NaN or Inf is NaN, in all elements
    of the heads that read it (a key with a score of -Inf may weigh nothing instead); nothing else reaches a row.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _validate_once(query, key, value, key_cache, value_cache, parts, out, selected_blocks)
    if isinstance(parts, AttentionParts):
        implementation = choose_implementation(implementation, query.device.type)
        if implementation != "reference":
            parts = prepare(parts, key_cache.shape[1], implementation=implementation)
    if out is None:
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[-1]))
    if isinstance(parts, PreparedParts):
        same("key_cache", "block size", key_cache.shape[1], parts.block_size)
        # torch.compile does not trace what launches the CUDA kernels
        if parts.implementation != "reference" and not (parts.implementation == "cuda" and compiling):
            fast = _load(parts.implementation).attend
            choice = _choice(parts.parts, selected_blocks)
            # An implementation answers False when only the reference is exact for these tensors.
            if fast(query, key, value, key_cache, value_cache, parts.plan, scale, out, **choice):
                return out
        parts = parts.parts
    return _load("reference").attend(query, key, value, key_cache, value_cache, parts, scale, out, selected_blocks)


def choose_implementation(implementation: str, device_type: str) -> str:
    """The implementation that runs on this type of device, `auto` resolved; ValueError for one that cannot."""
    if implementation == "auto":
        return _fastest(device_type)
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
    if implementation == "cuda" and (reason := why_not_triton(device_type)) is not None:
        raise ValueError(
            f"unified_attention: implementation 'cuda' cannot be used here ({reason}), choose 'auto' or 'reference'"
        )
    return implementation


def _fastest(device_type: str) -> str:
    if device_type == "hpu":
        return "hpu"
    # The others read the parts on the host or launch kernels of their own, which torch.compile cannot trace.
    if torch.compiler.is_compiling():
        return "reference"
    if device_type == "cpu":
        return "native" if native() is not None else "cpu"
    return _fastest_static(device_type)


def _fastest_static(device_type: str) -> str:
    if device_type == "cuda":
        return "cuda" if why_not_triton(device_type) is None else "reference"
    return "hpu" if device_type == "hpu" else "reference"


def choose_static_implementation(implementation: str, device_type: str) -> str:
    """As `choose_implementation`, for a step that is captured as a graph or compiled with its shapes."""
    if implementation == "auto":
        return _fastest_static(device_type)
    if implementation in IMPLEMENTATIONS and implementation not in STATIC_IMPLEMENTATIONS:
        known = ", ".join(("auto", *STATIC_IMPLEMENTATIONS))
        raise ValueError(
            f"unified_attention: implementation {implementation!r} reads the parts on the host, "
            f"which a graph excludes; choose one of {known}"
        )
    return choose_implementation(implementation, device_type)


_loaded: dict[str, ModuleType] = {}


def _load(name: str) -> ModuleType:
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = import_module(f"vllm_gaudi_ucm.ops.unified_attention.impl.{name}")
    return module


def _choice(parts: AttentionParts, selected_blocks: Tensor | None) -> dict[str, Tensor]:
    """The argument of an implementation that only a step with a selected part has."""
    if parts.selected is None:
        return {}
    return {"selected_blocks": parts.selected.blocks if selected_blocks is None else selected_blocks}


def _device_type(parts: AttentionParts, implementation: str) -> str:
    """Where the parts live; a step without any part has no tensor to ask and nothing to attend to: anywhere."""
    if parts.causal is not None:
        return parts.causal.groups.device.type
    if parts.shared is not None:
        return parts.shared.blocks.device.type
    if parts.unique is not None:
        return parts.unique.rows.device.type
    if parts.selected is not None:
        return parts.selected.blocks.device.type
    return "cuda" if implementation == "cuda" and why_not_triton("cpu") is not None else "cpu"


def _validate_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parts: AttentionParts | PreparedParts,
    out: Tensor | None,
    selected_blocks: Tensor | None,
) -> None:
    """Validates, unless a layer of the same step with tensors of the same kind was."""
    if not isinstance(parts, PreparedParts):
        validate(query, key, value, key_cache, value_cache, out)
        validate_selected(query, parts, selected_blocks)
        return
    tensors = (query, key, value, key_cache, value_cache, out, selected_blocks)
    kind = tuple(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    if kind not in parts.checked:
        validate(query, key, value, key_cache, value_cache, out)
        validate_selected(query, parts.parts, selected_blocks)
        parts.checked.add(kind)
