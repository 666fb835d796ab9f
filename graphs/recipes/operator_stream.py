"""The operators that reach the device while a region runs, hashed as they pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_ucm.graphs.recipes.recipe import MemoryNumbers, Recipe, describe, describe_tensor, memory_of, tensors_in

# Operators of these namespaces are nodes of a device's graph. Any other operator is someone's library operator, whose
# implementation runs operators of its own: those are what the device sees.
_NODES = frozenset(
    ("aten", "prim", "prims", "quantized", "mkldnn", "mkl", "onednn", "hpu", "c10d", "_c10d_functional", "inductor")
)
# Copies: name -> position of the source.
_COPIES = {"aten::_to_copy": 0, "aten::to": 0, "aten::copy_": 1, "aten::_copy_from": 0}
# What `x[...] = 1.0` becomes on CPU: the number arrives as a tensor without dimensions, on other devices as a scalar.
_LITERALS = frozenset(("aten::fill_", "aten::index_put_", "aten::_index_put_impl_"))


class Operator(NamedTuple):
    """Properties of one overload.

    name: with the overload, `aten.add.Tensor`.
    writes: some argument is written.
    metadata: only what the host knows of a tensor changes (`transpose_`, `detach_`); the device does nothing.
    library: defined by a library, and so replaced by what its implementation calls.
    source: position of what a copy copies, else None.
    literals: arguments without dimensions may be Python numbers in disguise.
    """

    name: str
    writes: bool
    metadata: bool
    library: bool
    source: int | None
    literals: bool


@cache
def operator_of(overload: OpOverload) -> Operator:
    """The properties of an overload; kept for good, since overloads are as many as the program has."""
    name = overload._schema.name
    metadata = torch.Tag.inplace_view in overload.tags or name == "aten::detach_" or overload.namespace == "prim"
    return Operator(
        str(overload),
        overload._schema.is_mutable,
        metadata,
        overload.namespace not in _NODES,
        _COPIES.get(name),
        name in _LITERALS,
    )


# Inputs named in a report: the first ones belong to the step, after them come weights.
_NAMED_INPUTS = 6


class OperatorStream(TorchDispatchMode):
    """Hashes the operators of this thread while it is entered.

    Every operator enters with its overload, its numbers and strings by value, and its tensors by type, shape, strides,
    storage offset and device type. Tensors are numbered by their memory in order of first appearance, so that the flow
    of data and aliasing enter too; their data and addresses never do. Not part of a recipe are
    views (a later operator shows the view that it reads), tensors returned as they are, changes of metadata,
    copies from the host (data arriving in a buffer) and operators that touch no tensor of the device. Copies to the
    host and reads on it do count: they end a device's recipe where they stand. With device type `cpu` every tensor is
    the device's. A tensor without dimensions counts by value where its number is handed over by the host.

    Not seen: what runs inside of compiled code or a replayed graph, and kernels launched past torch's dispatcher. Under
    inference mode torch shows composite operators whole (`linear`), otherwise in pieces: warm as you serve.

    Costs 15 to 18 us per operator, views included (one core of a shared x86 server, torch 2.13), 5 of which are torch's
    for any mode: a Llama of 30 layers took 28 ms more per step.
    """

    def __init__(self, label: str, device_type: str) -> None:
        super().__init__()
        self.paused = False
        self._label = label
        self._device_type = device_type
        self._start()

    def cut(self) -> Recipe | None:
        """The recipe of the operators since the last cut, or None if there were none; begins anew."""
        count = self._count
        recipe = Recipe(self._label, self._hash.digest(), count, self._first_at, tuple(self._inputs))
        self._start()
        return recipe if count else None

    def _start(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._count = 0
        self._first_at: dict[str, int] = {}
        self._inputs: list[str] = []
        self._numbers = MemoryNumbers()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        operator = operator_of(func)
        tensors: list[Tensor] = []
        # Before it runs, because an operator may change the metadata of its arguments.
        text = f"{operator.name}{describe(args, tensors)}{describe(kwargs, tensors) if kwargs else ''}"
        if operator.library and tensors:
            return self._run_library(func, text, tensors, args, kwargs)
        before = [memory_of(tensor) for tensor in tensors]
        if operator.literals or self._device_type != "cpu":
            text += self._literals(operator, tensors, before)
        result = func(*args, **kwargs)
        results = list(tensors_in(result))
        after = [memory_of(tensor) for tensor in results]
        if not self._is_hidden(operator, args, tensors + results, before, after):
            self._add(text, tensors, before, results, after)
        return result

    def _run_library(
        self, func: OpOverload, text: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A library's operator: its arguments, then the operators that its implementation runs, then its results."""
        on_device = any(map(self._on_device, tensors))
        if on_device:
            self._add(text, tensors, [memory_of(tensor) for tensor in tensors], [], [])
        key = torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(tensors[0].device.type))
        # Past the dispatcher's stop at modes, or this call would come back here for ever.
        redispatch: Callable[..., Any] = func.redispatch
        with self:
            result = redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        if on_device:
            results = list(tensors_in(result))
            self._add(f"end of {func}", [], [], results, [memory_of(tensor) for tensor in results])
        return result

    def _is_hidden(
        self, operator: Operator, args: tuple[Any, ...], tensors: list[Tensor], before: list[int], after: list[int]
    ) -> bool:
        """Whether the device would not see the operator."""
        if operator.metadata or not any(map(self._on_device, tensors)):
            return True
        source = None if operator.source is None else args[operator.source]
        if isinstance(source, Tensor) and not self._on_device(source):
            return True
        return not operator.writes and bool(after) and all(memory in before for memory in after)

    def _literals(self, operator: Operator, tensors: list[Tensor], memories: list[int]) -> str:
        """The numbers that the host hands over as tensors without dimensions."""
        if self._device_type == "cpu":
            # Only those that no operator here has made: the others would be on the device.
            pairs = zip(tensors, memories, strict=True)
            tensors = [tensor for tensor, memory in pairs if memory not in self._numbers]
        elif operator.source is not None or not any(map(self._on_device, tensors)):
            return ""
        return "".join(f" {tensor.item()!r}" for tensor in tensors if tensor.dim() == 0 and tensor.is_cpu)

    def _on_device(self, tensor: Tensor) -> bool:
        return self._device_type == "cpu" or tensor.device.type == self._device_type

    def _add(
        self, text: str, tensors: list[Tensor], before: list[int], results: list[Tensor], after: list[int]
    ) -> None:
        """Puts one operator into the hash: its text and the numbers of the memories it reads, writes and makes."""
        numbers = [self._number(tensor, memory, True) for tensor, memory in zip(tensors, before, strict=True)]
        if results:
            numbers += [self._number(tensor, memory, False) for tensor, memory in zip(results, after, strict=True)]
            text = f"{text} -> {', '.join(map(describe_tensor, results))}"
        self._hash.update(f"{text}|{numbers}\n".encode())
        self._first_at.setdefault(text, self._count)
        self._count += 1

    def _number(self, tensor: Tensor, memory: int, is_input: bool) -> int:
        number, is_new = self._numbers.number(tensor, memory)
        if is_new and is_input and len(self._inputs) < _NAMED_INPUTS:
            self._inputs.append(describe_tensor(tensor))
        return number
