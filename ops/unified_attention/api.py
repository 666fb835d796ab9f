"""Unified Attention of one layer: validates the tensors of a step, chooses the implementation and calls it."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.selected_list import SelectedList
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION, AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, PLAIN, AttentionSpec, PerHead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """The parts of a step and the plan that an implementation made of them; valid for all layers of the step.

    checked: shapes and dtypes of tensors that passed validation; the layers of a step mostly share them.
    """

    parts: AttentionParts
    block_size: int
    implementation: AttentionImplementation
    plan: Any
    checked: set[tuple[object, ...]] = field(default_factory=set, compare=False)

    def selected_list(self, rows: int) -> SelectedList | None:
        """Returns the list to which a choice may write the blocks for a layer of this many rows; None without one."""
        return self.implementation.selected_list(self.plan, rows)


Plan = Callable[[AttentionParts, int], Any]
"""The type of `AttentionImplementation.plan`."""


def prepare(
    parts: AttentionParts, block_size: int, *, implementation: str = AUTO, plan: Plan | None = None
) -> PreparedParts:
    """Plans a step once for all layers; pass the result to `unified_attention` in every layer.

    It pays off on a CPU, where `cpu` and `native` read the parts on the host to form their calls. The tensors of the
    parts must not change while the result is in use. A capturable implementation reads nothing on the host, so with it
    this call may be captured.

    plan: the implementation's `plan`, compiled (`plan_of`); None: not compiled.
    """
    chosen = _choose(implementation, _device_type(parts, implementation))
    return PreparedParts(parts, block_size, chosen, (plan or chosen.plan)(parts, block_size))


def plan_of(implementation: str) -> Plan | None:
    """Returns the function with which `prepare` plans a step, for a region of its own; None if it cannot be traced."""
    chosen = ATTENTION.make(implementation)
    return chosen.plan if chosen.traceable else None


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parts: AttentionParts | PreparedParts,
    spec: AttentionSpec,
    out: Tensor | None = None,
    *,
    implementation: str = AUTO,
    selected_blocks: Tensor | None = None,
    per_head: PerHead = NOTHING_PER_HEAD,
    log_sums: Tensor | None = None,
) -> Tensor:
    """Attention of the flat batch of a step over its new tokens and its cached blocks.

    query: [rows, heads, dim]; key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim]: the new tokens. They must
        already be in the cache (`ops.kv_cache.write_kv`), where single rows read their own token.
    key_cache: [blocks, block_size, kv_heads, dim]; value_cache: [blocks, block_size, kv_heads, value_dim]. Both may be
        strided views, and may have another float dtype than the query.
    parts: the tokens that each row sees. `prepare(parts, block_size)` saves work if many layers use the same parts.
    spec: scale, soft cap and other features of the layer.
    out: [rows, heads, value_dim] in the dtype of the query, or None to allocate it; every element is written.
    implementation: a name in `ATTENTION`, or `auto` for the fastest suitable one: on a CPU `native` if its kernels
        could be built, else `cpu`; `hpu` on a Gaudi; `cuda` on a GPU with Triton; otherwise `reference`, which also
        takes unprepared parts under torch.compile. Prepared parts keep the implementation that prepared them.
    selected_blocks: int64 [selected], the selection of this layer instead of `parts.selected.blocks`; only with that
        part.
    per_head: the sinks and slopes that `spec` says the layer has.
    log_sums: fp32 [rows, heads], or None; written with the natural logarithm of the sum over all keys of exp(score),
        `NOTHING_SEEN` for a row that sees nothing: needed to merge the result with attention to other keys.

    Returns out. A row that sees nothing is zeros. If a row sees a key or value with NaN or Inf, it is NaN in all
    elements of the heads that read it (except that a key with a score of -Inf may count as weight 0). Nothing else
    reaches a row.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling), or if no implementation, or not
    the requested one, supports the case.
    """
    if log_sums is not None and spec.has_sinks:
        raise ValueError(
            f"unified_attention: log_sums are requested for {spec}, expected no sinks: they belong to no key"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _validate_once(query, key, value, key_cache, value_cache, parts, out, selected_blocks)
    if isinstance(parts, PreparedParts):
        same("key_cache", "block size", key_cache.shape[1], parts.block_size)
        chosen, plan, parts = parts.implementation, parts.plan, parts.parts
    else:
        chosen = _choose(implementation, query.device.type, spec)
        plan = chosen.plan(parts, key_cache.shape[1])
    if not (spec.is_plain or compiling):
        _check_spec(chosen, spec)
    plain_heads = per_head.sinks is None and per_head.slopes is None
    if not compiling and not (spec.is_plain and plain_heads and not parts.are_local):
        validate_spec(query, parts, spec, per_head)
    if out is None:
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[-1]))
    if selected_blocks is None and parts.selected is not None:
        selected_blocks = parts.selected.blocks
    if not compiling or chosen.traceable:
        # implementations from outside need not know either of them
        more: dict[str, Any] = {} if plain_heads else {"per_head": per_head}
        if log_sums is not None:
            more["log_sums"] = log_sums
        done = chosen.attend(query, key, value, key_cache, value_cache, plan, spec, out, selected_blocks, **more)
        if done:
            return out
    # only the reference is exact for these tensors, or can be traced
    tensors = (query, key, value, key_cache, value_cache)
    _REFERENCE.attend(*tensors, parts, spec, out, selected_blocks, per_head, log_sums)
    return out


_REFERENCE = ATTENTION.make("reference")


def choose_implementation(
    implementation: str, device_type: str, specs: Iterable[AttentionSpec] = (), *, captured: bool = False
) -> str:
    """The implementation for this device type, with `auto` resolved: the fastest that computes all layers of `specs`.

    captured: for a step that is captured as a graph or compiled at static shapes.
    Raises ValueError if the named implementation cannot run there, or does not compute one of the layers.
    """
    specs = tuple(dict.fromkeys(specs))
    first = next((spec for spec in specs if spec.both_ways), _plain(implementation))
    chosen = plain = ATTENTION.choose(implementation, device_type, first, captured=captured)
    for spec in specs:
        if not chosen.supports(spec):
            chosen = ATTENTION.choose(implementation, device_type, spec, captured=captured)
    if not all(map(chosen.supports, specs)):
        chosen = _REFERENCE
    if chosen is not plain and not any(spec.both_ways for spec in specs):
        logger.warning(
            "unified_attention: %r does not compute all layers of this model, so %r computes them, slower",
            plain.name,
            chosen.name,
        )
    return chosen.name


def choose_static_implementation(implementation: str, device_type: str, specs: Iterable[AttentionSpec] = ()) -> str:
    """Like `choose_implementation`, for a step that is captured as a graph or compiled at static shapes."""
    return choose_implementation(implementation, device_type, specs, captured=True)


def _plain(implementation: str) -> AttentionSpec | None:
    """Returns what a plain layer asks of an implementation; nothing of a named one, which may be an encoder's."""
    return PLAIN if implementation == AUTO else None


def _choose(implementation: str, device_type: str, spec: AttentionSpec | None = None) -> AttentionImplementation:
    if torch.compiler.is_compiling() and implementation == AUTO:
        # torch.compile cannot trace the choice; engines prepare the parts outside
        return _REFERENCE
    return ATTENTION.choose(
        implementation, device_type, _plain(implementation) if spec is None or spec.is_plain else spec
    )


def _check_spec(chosen: AttentionImplementation, spec: AttentionSpec) -> None:
    if not chosen.supports(spec):
        raise ValueError(
            f"unified_attention: implementation {chosen.name!r} does not compute {spec}, prepare the parts of such a "
            "layer for 'reference'"
        )


def _device_type(parts: AttentionParts, implementation: str) -> str:
    """The device type of the parts. A step without parts has no tensors to compute, so any device will do."""
    if parts.causal is not None:
        return parts.causal.groups.device.type
    if parts.shared is not None:
        return parts.shared.blocks.device.type
    if parts.unique is not None:
        return parts.unique.rows.device.type
    if parts.selected is not None:
        return parts.selected.blocks.device.type
    if implementation == AUTO:
        return "cpu"
    named = ATTENTION.make(implementation)
    return min(named.devices) if named.devices and named.unavailable("cpu") is not None else "cpu"


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
    """Validates, unless a layer of the same step with the same shapes and dtypes has passed."""
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
