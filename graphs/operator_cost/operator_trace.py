"""Records the operators that reach the device while a region runs; on `meta` tensors nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vllm_gaudi_ucm.graphs.recipes.operator_stream import operator_of
from vllm_gaudi_ucm.graphs.recipes.recipe import tensors_in


class Access(NamedTuple):
    """Bytes [begin, end) of a memory that an operator touches.

    used: bytes of these that it needs. chosen: an index chooses those, so nobody knows where they are.
    """

    memory: int
    begin: int
    end: int
    used: int
    chosen: bool = False


@dataclass(frozen=True)
class Operation:
    """matrix: FLOPs of a matrix product. vector: elements that other arithmetic goes over, in units of two bytes."""

    name: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    matrix: int
    vector: float


# An index chooses among the rows of the first argument: only those are touched.
_GATHERS = frozenset(("aten::index_select", "aten::index", "aten::embedding", "aten::gather"))
_SCATTERS = frozenset(("aten::index_copy_", "aten::index_add_", "aten::index_reduce_", "aten::index_put_"))
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "copy_", "cat", "stack", "_to_copy", "fill_", "zero_", "zeros", "full", "ones", "arange"),
        *("new_full", "new_zeros", "zeros_like", "full_like", "constant_pad_nd", "index_copy_"),
    )
)
VECTOR_WORK: dict[Any, Callable[..., float]] = {}
"""Two-byte elements that the vector engines go over in operators that do more than one thing, of their arguments."""
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided"))


class OperatorTrace(TorchDispatchMode):
    """While it is entered, `operations` grows by every operator that is no view and no change of metadata.

    Memories are numbered in order of first appearance. `sizes`: their bytes. `outside`: those that were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.outside: set[int] = set()
        self._numbers: dict[int, int] = {}
        # While a storage is referred to, even weakly, its address is not given to another one.
        self._referred: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value)]
        reads = [self._access(tensor, True) for tensor in inputs]
        result = func(*args, **kwargs)
        name = func._schema.name
        results = list(tensors_in(result))
        if name in _ALLOCATIONS or operator_of(func).metadata or self._is_view(func, results, inputs):
            return result
        writes = [self._access(tensor, False) for tensor in results]
        self._add(func, name, args, kwargs, result, inputs, results, reads, writes)
        return result

    def _add(
        self,
        func: OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        inputs: list[Tensor],
        results: list[Tensor],
        reads: list[Access],
        writes: list[Access],
    ) -> None:
        if name in _GATHERS:
            reads[0] = _chosen(reads[0], sum(access.used for access in writes))
        elif name in _SCATTERS:
            writes = [_chosen(access, reads[-1].used) for access in writes]
            # what is added to must be read, what is replaced must not
            reads[0:1] = [] if name in _MOVES else [_chosen(reads[0], reads[-1].used)]
        elif name in _MOVES and operator_of(func).writes:
            reads = reads[1:]  # what was there is not looked at
        count = flop_registry.get(func._overloadpacket)
        matrix = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        own = VECTOR_WORK.get(func._overloadpacket)
        vector = 0.0 if matrix or name in _MOVES or name in _GATHERS else _vector_work(inputs, results)
        vector = vector if own is None else own(*args, **kwargs)
        self.operations.append(Operation(str(func), tuple(reads), tuple(writes), matrix, vector))

    def _is_view(self, func: OpOverload, results: list[Tensor], inputs: list[Tensor]) -> bool:
        if operator_of(func).writes or not results:
            return False
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        return all(tensor.untyped_storage()._cdata in given for tensor in results)

    def _access(self, tensor: Tensor, is_input: bool) -> Access:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._numbers)
            self._referred.append(StorageWeakRef(storage))
            self.sizes.append(storage.nbytes())
            if is_input:
                self.outside.add(number)
        size = tensor.element_size()
        pairs = [(int(length), int(step)) for length, step in zip(tensor.shape, tensor.stride(), strict=True)]
        begin = int(tensor.storage_offset()) * size
        span = 0 if tensor.numel() == 0 else (1 + sum((length - 1) * step for length, step in pairs)) * size
        distinct = size if span else 0
        for length, step in pairs:
            distinct *= length if step else 1
        # windows of an unfolded tensor overlap, so there are fewer bytes than elements
        return Access(number, begin, begin + span, min(distinct, span))


def _chosen(access: Access, used: int) -> Access:
    """An access by index; one that needs no less than everything is an ordinary one."""
    return access if used >= access.used else access._replace(used=used, chosen=True)


def _vector_work(inputs: list[Tensor], results: list[Tensor]) -> float:
    """The largest tensor in it, in two-byte elements: the vector engines do twice as many of those."""
    floats = [tensor for tensor in (*inputs, *results) if tensor.is_floating_point()] or [*inputs, *results]
    return max((tensor.numel() * max(1.0, tensor.element_size() / 2) for tensor in floats), default=0.0)


def trace(run: Any, *args: Any) -> OperatorTrace:
    """The operators of `run(*args)`; composite ones in pieces."""
    with torch.inference_mode(False), torch.no_grad(), OperatorTrace() as found:
        run(*args)
    return found
