"""Sees every operator of a thread: those on the card are checked, counted into the stream, and recorded if captured."""

from collections.abc import Mapping, Sequence
from typing import Any

from habana_frameworks.torch.internal.bridge_config import compile_only
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.dtype_views import dtype_views
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.minus_one import run_with_pads
from habana_frameworks.torch.simulator.operators import check_known
from habana_frameworks.torch.simulator.own_formats import run_own_format
from habana_frameworks.torch.simulator.rules import (
    NAMESPACES,
    check_operator,
    has_dynamic_shape,
    named_arguments,
    reads_host,
)
from habana_frameworks.torch.simulator.state import is_lazy, state
from habana_frameworks.torch.simulator.tape import tensors_in

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
# Where an index lives on the host, torch copies it first, on every accelerator.
_MOVES_INDICES = frozenset({"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})
# Of their host inputs these read the shape alone.
_SHAPED_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
# Calls of HCCL, for which nothing is compiled. In lazy mode they are part of what accumulates.
_BETWEEN_CARDS = frozenset({"c10d::send", "c10d::recv_"})
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty"))


class OperatorMode(TorchDispatchMode):
    """One per thread, always entered."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile may trace under this mode; what it compiled is seen again when it runs."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in(args) + tensors_in(kwargs)
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in inputs) or not _is_on_card(inputs):
            return func(*args, **kwargs)
        opened = self._open(func, args, kwargs)
        if opened is not NotImplemented:
            return opened
        name = func._schema.name
        if reads_host(func):
            state.read_on_host(func)
            for tensor in inputs:
                garbage.check_read(func, tensor)
            return func(*args, **kwargs)
        if name in _COPIES and not _stays_on_card(inputs):
            return _copy(func, args, kwargs)
        _check_devices(func, name, inputs)
        check_known(func)
        return _on_card(func, args, kwargs)

    def _open(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the operators that an operator is made of, seen by this mode; NotImplemented if it is one itself."""
        if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        # Kernels of other libraries (vLLM's) are Python, whose operators count.
        if func.namespace in NAMESPACES:
            return NotImplemented
        for key in (DispatchKey.HPU, DispatchKey.CompositeExplicitAutograd, DispatchKey.CPU):
            if func.has_kernel_for_dispatch_key(key):
                with self:
                    return func._op_dk(key, *args, **kwargs)
        return NotImplemented


def _is_on_card(inputs: Sequence[torch.Tensor]) -> bool:
    """Where an operator runs: what is being made, and its inputs decide."""
    if state.making is not None:
        return state.making == "card"
    return any(memory.serial(tensor) is not None for tensor in inputs)


def _stays_on_card(inputs: Sequence[torch.Tensor]) -> bool:
    """A single number too is copied from the host, where any other operator takes it by value.

    `x[i] = 2.0` is such a copy, into one element; where there is more to write, torch fills.
    """
    target, *sources = (memory.serial(tensor) is not None for tensor in inputs)
    return target and all(sources)


def _copy(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Between host and card, which is no recipe. `_to_copy` of the card's own tensors never comes here."""
    target = args[0]
    if memory.serial(target) is None:
        state.read_on_host(func)
        garbage.check_read(func, args[1])
    elif state.region is not None:
        raise HpuConstraintError(func, f"a copy from the host inside a region captured by {state.region}")
    else:
        state.catch_up()
    return func(*args, **kwargs)


def _check_devices(func: OpOverload, name: str, inputs: Sequence[torch.Tensor]) -> None:
    if name.endswith(_SHAPED_LIKE):
        return
    for tensor in inputs:
        if memory.serial(tensor) is None and tensor.dim() > 0:
            if name in _MOVES_INDICES and state.region is None:
                continue
            raise HpuConstraintError(
                func, f"a tensor of shape {tuple(tensor.shape)} is on the host, expected all tensors on the card"
            )


def _on_card(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Checks the operator, counts it, and runs it."""
    named = named_arguments(func, args, kwargs)
    dynamic = has_dynamic_shape(func, named)
    if dynamic is not None:
        if state.region is not None:
            raise HpuConstraintError(func, f"{dynamic}, inside a region captured by {state.region}")
        state.read_on_host(func)
    if not compile_only():
        check_operator(func, named)
    if func.is_view:
        result = _mark(func(*args, **kwargs))
        if isinstance(result, torch.Tensor) and isinstance(args[0], torch.Tensor):
            dtype_views.note(args[0], result)
        return result
    if func._schema.name not in _ALLOCATIONS:
        if is_lazy() or func._schema.name not in _BETWEEN_CARDS:
            state.stream.add(func, args, kwargs)
        state.catch_up()
    encoded = state.tape.encode(args, kwargs) if state.tape is not None else None
    result = _mark(_without_writing(func, args, kwargs) if compile_only() else _compute(func, args, kwargs, named))
    outputs = tensors_in(result)
    state.stream.results(outputs)
    if encoded is not None and state.tape is not None:
        state.tape.add(func, encoded, outputs)
    card.executed += 1
    state.operator_ran()
    return result


def _mark(result: Any) -> Any:
    for tensor in tensors_in(result):
        memory.put(tensor)
    return result


def _compute(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    found = run_with_pads(func, named) if duties.minus_one else NotImplemented
    if found is NotImplemented:
        found = run_own_format(func, args, kwargs)
    return func(*args, **kwargs) if found is NotImplemented else found


def _without_writing(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """PT_COMPILE_ONLY_MODE: shapes as they would be, but nothing is written and results are garbage (duty 22)."""
    if func._schema.is_mutable:
        return args[0]
    if not is_lazy() and duties.on(22):
        return _garbage_of(func, args, kwargs)
    result = func(*args, **kwargs)
    for tensor in tensors_in(result):
        if tensor.is_floating_point():
            garbage.fill(tensor)
    return result


def _garbage_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """From shapes alone: garbage as an index would be an error where something is computed with it."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
        shapes = func(*given[0], **given[1])
    return tree_map_only(torch.Tensor, garbage.like, shapes)
