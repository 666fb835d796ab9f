"""A recipe: the operators of one region, hashed as they pass, and a report on a new one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# Values that a device compiles into a recipe. Their repr is unambiguous: 1, 1.0 and True differ.
_BY_VALUE = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
# the most frequent of them, exactly
_PLAIN = frozenset((bool, int, float, str, type(None)))


def describe(value: object, tensors: list[Tensor]) -> str:
    """Returns the text of one argument, with containers recursed; the tensors in it are appended to `tensors` in order
    of appearance.

    Tensors by type, shape, view and device type, never by data; numbers and strings by value; anything else (a
    generator, a process group) by its type, because a device takes its state as data.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return describe_tensor(value)
    if isinstance(value, (tuple, list)):
        return describe_all(value, tensors)
    if isinstance(value, dict):
        return f"{{{', '.join([f'{key}={describe(item, tensors)}' for key, item in value.items()])}}}"
    if isinstance(value, _BY_VALUE):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    return f"<{type(value).__qualname__}>"


def describe_all(values: Iterable[object], tensors: list[Tensor]) -> str:
    """Returns the text of an operator's arguments, or of a list: like `describe`, with fewer calls."""
    texts = []
    for value in values:
        if type(value) in _PLAIN:
            texts.append(repr(value))
        elif isinstance(value, Tensor):
            tensors.append(value)
            texts.append(describe_tensor(value))
        else:
            texts.append(describe(value, tensors))
    return f"[{', '.join(texts)}]"


def describe_tensor(tensor: Tensor) -> str:
    """Returns text like `float32[4, 6]@cpu`, with strides and storage offset if the tensor is not its whole memory in
    order.
    """
    if tensor.layout is not torch.strided:
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.layout}@{tensor.device.type}"
    return _text(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device)


def tensors_in(result: object) -> Iterator[Tensor]:
    """Returns the tensors that an operator returned; numbers that it returned are data, not a part of a recipe."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_in(item)


# Formatting the text costs more than all else; a step has few different tensors. A shape that was evicted is formatted
# again.
@lru_cache(maxsize=16384)
def _text(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int, device: torch.device) -> str:
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    in_order, step = [], 1
    for size in reversed(shape):
        in_order.append(step)
        step *= size
    if stride != tuple(reversed(in_order)):
        text += f"strides{list(stride)}"
    return f"{text}{f'+{offset}' if offset else ''}@{device.type}"


class Recipe(NamedTuple):
    """The operators of a region.

    label: name of the region. digest: 16 bytes, equal for regions that a device would compile to one recipe.
    operators: their number. first_at: text of each different operator -> position of its first occurrence.
    inputs: texts of the first tensors from outside.
    """

    label: str
    digest: bytes
    operators: int
    first_at: dict[str, int]
    inputs: tuple[str, ...]


class NewRecipe(NamedTuple):
    """A recipe that was first seen after warm-up.

    label, operators, inputs: as in `Recipe`.
    new_operators: the first few (position, text) of operators that no earlier recipe has.
    new_operator_count: the number of different new operators; 0 means that known operators came in another order, or
        with another flow of data.
    """

    label: str
    operators: int
    inputs: tuple[str, ...]
    new_operators: tuple[tuple[int, str], ...]
    new_operator_count: int

    def __str__(self) -> str:
        what = f"recipe {self.label!r} of {self.operators} operators was first seen after warm-up"
        inputs = f"; its inputs begin with {', '.join(self.inputs) or 'none'}"
        if not self.new_operator_count:
            return f"{what}: each operator is known, but not in this order or with this flow of data{inputs}"
        named = "; ".join(f"operator {position}: {text}" for position, text in self.new_operators)
        return f"{what}: {self.new_operator_count} operators are new, first {named}{inputs}"


class MemoryNumbers:
    """A number for each memory that was seen, as long as it lives.

    A memory is identified by the Python object of its storage, which lives exactly as long as the storage. No data
    about a freed memory is kept: torch's own weak references keep the header of the storage, a few bytes on the heap
    that keep a large freed block next to them from being reused (5.7 GiB after 120 tensors of 48 MiB, one at a time).
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._count = 0
        self.known = self._seen.get

    def __contains__(self, memory: int) -> bool:
        return memory in self._seen

    def number(self, tensor: Tensor, memory: int) -> tuple[int, bool]:
        """Returns the number of a tensor's memory, and whether it is new. memory: the result of `memory_of`."""
        known = self._seen.get(memory)
        if known is not None:
            return known[0], False
        seen, number = self._seen, self._count
        # called before the storage is gone: its id is not reused while it can still be found here
        seen[memory] = number, weakref.ref(_owner(tensor), lambda _: seen.pop(memory))
        self._count += 1
        return number, True


def memory_of(tensor: Tensor) -> int:
    """Returns an id that distinguishes memories while they live."""
    return id(_owner(tensor))


def _owner(tensor: Tensor) -> object:
    """Returns the owner of a tensor's memory. A packed weight has no storage and is its own owner."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


# Operators of these namespaces are nodes of a device's graph. Any other operator belongs to a library; its
# implementation runs other operators, and the device sees these.
_NODES = frozenset(
    ("aten", "prim", "prims", "quantized", "mkldnn", "mkl", "onednn", "hpu", "c10d", "_c10d_functional", "inductor")
)
# Copies: name -> position of the source.
_COPIES = {"aten::_to_copy": 0, "aten::to": 0, "aten::copy_": 1, "aten::_copy_from": 0}
# `x[...] = 1.0` becomes this on a CPU: the number arrives as a tensor without dimensions; on other devices, as a
# scalar.
_LITERALS = frozenset(("aten::fill_", "aten::index_put_", "aten::_index_put_impl_"))


class Operator(NamedTuple):
    """Properties of one overload.

    name: name with the overload, `aten.add.Tensor`.
    writes: some argument is written.
    metadata: only what the host knows of a tensor changes (`transpose_`, `detach_`); the device does nothing.
    library: defined by a library, and so replaced by the operators that its implementation calls.
    source: position
        of a copy's source, otherwise None.
    literals: arguments without dimensions may be Python numbers in disguise.
    views: its result may be its first argument's memory, which it does not write.
    """

    name: str
    writes: bool
    metadata: bool
    library: bool
    source: int | None
    literals: bool
    views: bool


@cache
def operator_of(overload: OpOverload) -> Operator:
    """The properties of an overload. They are kept forever, because a program has a fixed number of overloads."""
    schema = overload._schema
    name = schema.name
    aliases = any(returned.alias_info is not None for returned in schema.returns)
    metadata = torch.Tag.inplace_view in overload.tags or name == "aten::detach_" or overload.namespace == "prim"
    return Operator(
        str(overload),
        schema.is_mutable,
        metadata,
        overload.namespace not in _NODES,
        source=_COPIES.get(name),
        literals=name in _LITERALS,
        views=aliases and not schema.is_mutable and overload.namespace in _NODES,
    )


# Inputs named in a report: the first ones belong to the step; weights follow.
_NAMED_INPUTS = 6


class OperatorStream(TorchDispatchMode):
    """Hashes the operators of this thread while it is entered.

    Every operator enters with its overload, its numbers and strings by value, and its tensors by type, shape, strides,
    storage offset and device type. Tensors are numbered by their memory in order of first appearance, so that the flow
    of data and aliasing enter too; their data and addresses never do. A recipe does not include views (a later operator
    shows the view that it reads), tensors returned as they are, changes of metadata, copies from the host (data
    arriving in a buffer) and operators that touch no tensor of the device. Copies to the host and reads on it do count:
    they end a device's recipe. With device type `cpu` every tensor is the device's. A tensor without dimensions counts
    by value if the host provides its number.

    Not seen: operators inside compiled code or a replayed graph, and kernels launched without torch's dispatcher. Under
    inference mode torch shows composite operators whole (`linear`), otherwise in pieces: warm as you serve.

    Costs 12 to 14 us per operator, views included (one core of a shared x86 server, torch 2.13), 5 of which are torch's
    for any mode.
    """

    def __init__(self, label: str, device_type: str) -> None:
        super().__init__()
        self.paused = False
        self._label = label
        self._device_type = device_type
        self._start()

    def cut(self) -> Recipe | None:
        """Returns the recipe of the operators since the last cut, or None if there were none, and starts the next."""
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
        result = None
        if operator.views:
            # a third of all operators, and not part of a recipe: not worth a text
            result = func(*args, **kwargs)
            given = args[0] if args else None
            if isinstance(result, Tensor) and isinstance(given, Tensor) and memory_of(result) == memory_of(given):
                return result
        tensors: list[Tensor] = []
        # Before it runs, because an operator may change the metadata of its arguments.
        text = f"{operator.name}{describe_all(args, tensors)}{describe(kwargs, tensors) if kwargs else ''}"
        if operator.library and tensors:
            return self._run_library(func, text, tensors, args, kwargs)
        before = [memory_of(tensor) for tensor in tensors]
        if operator.literals or self._device_type != "cpu":
            text += self._literals(operator, tensors, before)
        if not operator.views:
            result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(tensors_in(result))
        after = [memory_of(tensor) for tensor in results]
        if not self._is_hidden(operator, args, tensors + results, before, after):
            self._add(text, tensors, before, results, after)
        return result

    def _run_library(
        self, func: OpOverload, text: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a library's operator: its arguments, then the operators that its implementation runs, then its
        results.
        """
        on_device = any(map(self._on_device, tensors))
        if on_device:
            self._add(text, tensors, [memory_of(tensor) for tensor in tensors], [], [])
        key = torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(tensors[0].device.type))
        # Bypasses the dispatcher's mode handling; otherwise this call would recurse forever.
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
        """True if the device would not see the operator."""
        if operator.metadata or not tensors or not (self._device_type == "cpu" or any(map(self._on_device, tensors))):
            return True
        source = None if operator.source is None else args[operator.source]
        if isinstance(source, Tensor) and not self._on_device(source):
            return True
        return not operator.writes and bool(after) and all(memory in before for memory in after)

    def _literals(self, operator: Operator, tensors: list[Tensor], memories: list[int]) -> str:
        """Returns the numbers that the host provides as tensors without dimensions."""
        if self._device_type == "cpu":
            # Only tensors that no recorded operator has made: the others would be on the device.
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
        """Adds one operator to the hash: its text and the numbers of the memories it reads, writes and makes."""
        numbers = []
        known = self._numbers.known
        for tensor, memory in zip(tensors, before, strict=True):
            number = known(memory)
            numbers.append(self._number(tensor, memory, True) if number is None else number[0])
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
