"""Unified Attention on a CPU in C++ (ops/cpu/native/source/attention.cpp): one call per layer, planned once per step.

It never reads a token that a row does not see. If a score or a result is not finite, `attend` returns False, and the
caller uses the reference, which defines the result of a row that sees NaN or Inf.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.native_jobs import Jobs, make_jobs
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

_ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CACHE_TYPES = {**_ROW_TYPES, torch.float8_e4m3fn: 3}
LARGEST_HEAD = 576  # in 16 or 8 bits, converted in a buffer of this size


class _Plan(ctypes.Structure):
    """`Plan` of source/attention_job.h."""

    _fields_ = (
        ("jobs", c_void_p),
        ("num_jobs", c_int64),
        ("rows", c_void_p),
        ("ranges", c_void_p),
        ("merges", c_void_p),
        ("num_merges", c_int64),
        ("empty", c_void_p),
        ("num_empty", c_int64),
        ("partials", c_void_p),
    )


class _Layer(ctypes.Structure):
    """`Layer` of source/attention_job.h: sizes, then strides, in elements."""

    _fields_ = (
        ("sizes", c_int64 * 8),
        ("strides", c_int64 * 12),
        ("scale", c_float),
        ("cap", c_float),
    )


class _Tensors(ctypes.Structure):
    """`Tensors` of source/attention_job.h."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("query", "key", "value", "key_cache", "value_cache", "out", "selected", "sinks", "slopes")
    )


@dataclass
class NativePlan:
    """The jobs of a step, and data shared by its layers. Only one layer may use it at a time, because it holds partial
    results.

    selected: int64, the blocks of the selected part for layers that pass none; empty without such a part.
    """

    jobs: Jobs
    struct: _Plan
    selected: Tensor
    partials: Tensor | None = None
    layers: dict[tuple[object, ...], _Layer] = field(default_factory=dict)
    tensors: _Tensors = field(default_factory=_Tensors)


class NativeAttention(AttentionImplementation):
    """Unified Attention by C++ kernels, on CPUs where they can be built."""

    devices = frozenset({"cpu"})
    priority = 20
    capturable = False
    traceable = False

    def supports(self, spec: AttentionSpec) -> bool:
        return not spec.both_ways

    def unavailable(self, device: str) -> str | None:
        return super().unavailable(device) or why_not_native() or None

    def plan(self, parts: AttentionParts, block_size: int) -> NativePlan:
        """Builds the jobs for the parts of a step; reads the parts on the host."""
        jobs = make_jobs(parts, block_size)
        struct = _Plan(
            _address(jobs.jobs),
            len(jobs.jobs),
            _address(jobs.rows),
            _address(jobs.ranges),
            _address(jobs.merges),
            len(jobs.merges),
        )
        selected = torch.empty(0, dtype=torch.int64) if parts.selected is None else parts.selected.blocks.contiguous()
        return NativePlan(jobs, struct, selected)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: NativePlan,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface. Raises IndexError if a block is outside the cache."""
        if log_sums is not None:
            return False
        library = native()
        assert library is not None, "planned for kernels that are not there"
        layer = _layer(query, key, value, key_cache, value_cache, plan, spec)
        if layer is None:
            return False
        is_direct = out.dtype == query.dtype and out.is_contiguous()
        result = out if is_direct else query.new_empty(out.shape)
        tensors = plan.tensors
        tensors.query, tensors.key, tensors.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        tensors.key_cache, tensors.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        tensors.out = result.data_ptr()
        selected = plan.selected if selected_blocks is None else selected_blocks.contiguous()
        tensors.selected = selected.data_ptr()
        tensors.sinks, tensors.slopes = (
            None if one is None else one.data_ptr() for one in (per_head.sinks, per_head.slopes)
        )
        status = library.ucm_attend(ctypes.byref(plan.struct), ctypes.byref(layer), ctypes.byref(tensors))
        if status == 2:
            given = "the parts or of selected_blocks" if len(selected) else "the parts"
            raise IndexError(
                f"unified_attention: a block of {given} is outside of the cache, "
                f"which has {key_cache.shape[0]} blocks of {key_cache.shape[1]} tokens"
            )
        if status == 0 and result is not out:
            out.copy_(result)
        return status == 0


def _layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: NativePlan,
    spec: AttentionSpec,
) -> _Layer | None:
    """The description of the layer, made once per kind of layer; None if the kernel does not cover it."""
    five = (query, key, value, key_cache, value_cache)
    strides = tuple(tensor.stride() for tensor in five)
    dtypes = query.dtype, key_cache.dtype
    kind = (strides, query.shape, value_cache.shape, dtypes, spec.scale, spec.logits_soft_cap)
    layer = plan.layers.get(kind)
    if layer is not None:
        return layer
    dim, value_dim = query.shape[2], value.shape[2]
    if query.dtype not in _ROW_TYPES or key_cache.dtype not in _CACHE_TYPES:
        return None
    if any(stride[-1] != 1 for stride in strides):
        return None
    if dtypes != (torch.float32, torch.float32) and max(dim, value_dim) > LARGEST_HEAD:
        return None
    types = _CACHE_TYPES[key_cache.dtype], _ROW_TYPES[query.dtype]
    rows, heads, _ = query.shape
    blocks, block_size, kv_heads, _ = key_cache.shape
    layer = plan.layers[kind] = _Layer(
        (c_int64 * 8)(heads, kv_heads, dim, value_dim, blocks, block_size, *types),
        (c_int64 * 12)(*(number for stride in strides for number in stride[:-1])),
        spec.scale,
        spec.logits_soft_cap or 0.0,
    )
    _make_room(plan, rows, heads, value_dim)
    return layer


def _make_room(plan: NativePlan, rows: int, heads: int, value_dim: int) -> None:
    """Makes room for the partial results of any layer, and finds the rows without a job."""
    size = plan.jobs.partials * heads * (value_dim + 2)
    if plan.partials is None or plan.partials.numel() < size:
        plan.partials = torch.empty(size, dtype=torch.float32)
        plan.struct.partials = plan.partials.data_ptr()
    empty = plan.jobs.empty_rows(rows)
    plan.struct.empty, plan.struct.num_empty = _address(empty), len(empty)


class RecordedPlan:
    """Takes the place of a plan in recorded calls, so that a replay can use the plan of another step.

    Args:
        plan: the plan of the recorded step.
    """

    def __init__(self, plan: NativePlan) -> None:
        self._replaced = id(plan.struct)
        self._struct = _Plan()
        self._rooms: list[tuple[int, int, int]] = []

    @property
    def stand_ins(self) -> dict[int, ctypes.Structure]:
        """The structures that recorded calls pass, by the id of the original ones."""
        return {self._replaced: self._struct}

    def recorded(self, plan: NativePlan, rows: int) -> None:
        """Marks the end of recording: call it after all layers have run with the plan, when the memory that they
        need is known.
        """
        self._rooms = [(rows, layer.sizes[0], layer.sizes[3]) for layer in plan.layers.values()]

    def bind(self, plan: NativePlan) -> None:
        """Points the recorded calls at `plan`, which must have as many rows and live as long as they run."""
        for room in self._rooms:
            _make_room(plan, *room)
        ctypes.pointer(self._struct)[0] = plan.struct


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
