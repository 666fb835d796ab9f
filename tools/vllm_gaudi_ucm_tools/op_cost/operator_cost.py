"""Estimates what the operators of a region cost on a device: FLOPs, bytes and time of their stream, recorded on `meta`
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vllm_gaudi_ucm_tools.op_cost.work import Work
from vllm_gaudi_ucm_tools.recipes.recipe import operator_of, tensors_in


class Access(NamedTuple):
    """Bytes [begin, end) of a memory that an operator touches.

    used: how many of these bytes it needs. chosen: an index chooses them at run time, so their places are unknown.
    """

    memory: int
    begin: int
    end: int
    used: int
    chosen: bool = False


@dataclass(frozen=True)
class TracedOperator:
    """matrix: FLOPs of a matrix product. vector: elements that other arithmetic processes, in units of two bytes."""

    name: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    matrix: int
    vector: float


# An index chooses rows of the first argument: only these are touched.
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
"""Two-byte elements of their arguments that the vector engines process in operators that do more than one thing."""
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided"))


class OperatorTrace(TorchDispatchMode):
    """Records in `operations`, while entered, every operator except views and changes of metadata.

    Memories are numbered in order of first appearance. `sizes`: their bytes. `outside`: memories from before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[TracedOperator] = []
        self.sizes: list[int] = []
        self.outside: set[int] = set()
        self._numbers: dict[int, int] = {}
        # While a storage is referenced, even weakly, its address is not given to another one.
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
        self._add(func, name, args, kwargs, result=result, inputs=inputs, results=results, reads=reads, writes=writes)
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
            # an addition reads its target, a replacement does not
            reads[0:1] = [] if name in _MOVES else [_chosen(reads[0], reads[-1].used)]
        elif name in _MOVES and operator_of(func).writes:
            reads = reads[1:]  # the old content is not read
        count = flop_registry.get(func._overloadpacket)
        matrix = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        own = VECTOR_WORK.get(func._overloadpacket)
        vector = 0.0 if matrix or name in _MOVES or name in _GATHERS else _vector_work(inputs, results)
        vector = vector if own is None else own(*args, **kwargs)
        self.operations.append(TracedOperator(str(func), tuple(reads), tuple(writes), matrix, vector))

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
        extent = 0 if tensor.numel() == 0 else (1 + sum((length - 1) * step for length, step in pairs)) * size
        distinct = size if extent else 0
        for length, step in pairs:
            distinct *= length if step else 1
        # windows of an unfolded tensor overlap, so there are fewer bytes than elements
        return Access(number, begin, begin + extent, min(distinct, extent))


def _chosen(access: Access, used: int) -> Access:
    """Returns an access by index; an access that needs everything is an ordinary one."""
    return access if used >= access.used else access._replace(used=used, chosen=True)


def _vector_work(inputs: list[Tensor], results: list[Tensor]) -> float:
    """The size of the largest tensor, in two-byte elements: the vector engines process twice as many of them."""
    floats = [tensor for tensor in (*inputs, *results) if tensor.is_floating_point()] or [*inputs, *results]
    return max((tensor.numel() * max(1.0, tensor.element_size() / 2) for tensor in floats), default=0.0)


def trace(run: Any, *args: Any) -> OperatorTrace:
    """Traces the operators of `run(*args)`; composite ones in pieces."""
    with torch.inference_mode(False), torch.no_grad(), OperatorTrace() as found:
        run(*args)
    return found


LINE = 512 << 10


class OnChipMemory:
    """Lines of memories. Reading a missing line, and evicting a written one, is traffic.

    A line of a memory that is not read again is dropped at no cost. Memory from outside is written back.
    """

    def __init__(self, capacity: int, sizes: Sequence[int]) -> None:
        """capacity: bytes. sizes: bytes of each memory."""
        self.traffic = 0
        self._capacity = capacity
        self._sizes = sizes
        self._used = 0
        # (memory, line) -> whether it was written, in the order of last use
        self._lines: OrderedDict[tuple[int, int], bool] = OrderedDict()

    def read(self, access: Access) -> None:
        if access.chosen:
            self.traffic += int(access.used * (1 - self._share_here(access)))
            return
        for line in _lines(access):
            written = self._lines.get(line)
            if written is None:
                self.traffic += self._size(line)
            self._put(line, bool(written))

    def write(self, access: Access) -> None:
        if access.chosen and self._share_here(access) < 1:
            self.traffic += access.used
            return
        for line in _lines(access):
            self._put(line, True)

    def forget(self, memory: int, write_back: bool) -> None:
        """Drops a memory that is not used again; writes to memory from outside still count."""
        for line in _lines(Access(memory, 0, self._sizes[memory], 0)):
            written = self._lines.pop(line, None)
            if written is not None:
                self._used -= self._size(line)
                self.traffic += self._size(line) if written and write_back else 0

    def _share_here(self, access: Access) -> float:
        lines = _lines(access)
        return sum(line in self._lines for line in lines) / max(1, len(lines))

    def _size(self, line: tuple[int, int]) -> int:
        return min(LINE, self._sizes[line[0]] - line[1] * LINE)

    def _put(self, line: tuple[int, int], written: bool) -> None:
        if line not in self._lines:
            self._used += self._size(line)
        self._lines[line] = written
        self._lines.move_to_end(line)
        while self._used > self._capacity:
            oldest, was_written = self._lines.popitem(last=False)
            self._used -= self._size(oldest)
            self.traffic += self._size(oldest) if was_written else 0


def memory_traffic(trace: OperatorTrace, capacity: int) -> int:
    """The bytes that operators move to and from memory, run one after the other, with `capacity` bytes on the chip."""
    chip = OnChipMemory(capacity, trace.sizes)
    last: dict[int, int] = {}
    for index, operation in enumerate(trace.operations):
        last.update(dict.fromkeys(_memories(operation), index))
    for index, operation in enumerate(trace.operations):
        for access in operation.reads:
            chip.read(access)
        for access in operation.writes:
            chip.write(access)
        for memory in _memories(operation):
            if last[memory] == index:
                chip.forget(memory, memory in trace.outside)
    return chip.traffic


def _memories(operation: TracedOperator) -> set[int]:
    return {access.memory for access in (*operation.reads, *operation.writes)}


def _lines(access: Access) -> list[tuple[int, int]]:
    first, end = access.begin // LINE, -(-access.end // LINE) if access.end > access.begin else 0
    return [(access.memory, number) for number in range(first, end)]


@dataclass(frozen=True)
class StreamCost:
    """A stream of operators on one device.

    work: the work if results stay on the chip as long as there is room. touched: bytes that the operators read and
    write, as if each went to the device's memory. operators: how many there are to compile.
    """

    work: Work
    touched: int
    operators: int

    @classmethod
    def from_trace(cls, trace: OperatorTrace, on_chip: int) -> StreamCost:
        """Computes the cost. on_chip: bytes of SRAM."""
        operations = trace.operations
        work = Work(
            float(sum(operation.matrix for operation in operations)),
            float(memory_traffic(trace, on_chip)),
            sum(operation.vector for operation in operations),
        )
        touched = sum(access.used for o in operations for access in (*o.reads, *o.writes))
        return cls(work, touched, len(operations))
