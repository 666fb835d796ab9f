"""A captured function: lists of native calls, and the torch operations between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.cpu.native.call_list import KERNELS, Call, CallList, record_call
from vllm_gaudi_ucm.ops.cpu.native.library import native, standing_in

_ALLOCATIONS = (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format)
# A function that computes more than this with torch gains nothing from a graph.
MOST_OPERATIONS = 16
# Kernels that answer a question about the process and compute nothing.
_QUESTIONS = frozenset(
    {"ucm_lanes", "ucm_matrix_tiles", "ucm_uses_matrix_tiles", "ucm_multiplies_bf16", "ucm_multiplies_int8"}
)


class Operation(NamedTuple):
    """An operation of torch; `result` is None if it only writes to its arguments."""

    function: OpOverload
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Tensor | None

    def run(self) -> None:
        """Repeats the operation, and writes the result to the same memory."""
        found = self.function(*self.arguments, **self.named)
        if self.result is not None:
            self.result.copy_(found)


class Capture:
    """Runs a function and records it.

    recorded: calls and operations in order. refused: why it cannot be replayed, or empty. stopped: a kernel failed, so
    recording another run may succeed. kept: objects that the addresses of the calls point into.

    Args:
        pool: gives memory to the tensors that the function allocates.
        stand_ins: see `record_call`.
    """

    def __init__(self, pool: MemoryPool, stand_ins: Mapping[int, Structure]) -> None:
        self.recorded: list[Call | Operation] = []
        self.kept: list[object] = []
        self.refused = ""
        self.stopped = False
        self._pool = pool
        self._stand_ins = stand_ins
        self._operations = 0

    def record(self, function: Callable[[], Tensor]) -> Tensor:
        """Runs the function and returns its result. If the function raises, there is no graph."""
        with standing_in(_RecordingLibrary(self)), _Operations(self, self._pool):
            return function()

    def call(self, name: str, arguments: tuple[Any, ...], returned: int | None) -> None:
        """Records a kernel that has run."""
        if name not in KERNELS:
            self.refuse(f"it calls the kernel {name}")
            return
        if (returned or 0) != KERNELS[name].done:
            self.stopped = True
            self.refuse(f"{name} returned {returned}")
        call, kept = record_call(name, arguments, self._stand_ins)
        self.recorded.append(call)
        self.kept += kept

    def operation(self, operation: Operation) -> None:
        """Records an operation of torch that is neither a view nor an allocation."""
        self.recorded.append(operation)
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            self.refuse(f"it has more than {MOST_OPERATIONS} operations of torch, {operation.function} among them")

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason


class _RecordingLibrary:
    """The kernels; records each one that runs."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._library = native()

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        function: Callable[..., int | None] = getattr(self._library, name)
        if name in _QUESTIONS:
            return function

        def call(*arguments: Any) -> int | None:
            returned = function(*arguments)
            self._capture.call(name, arguments, returned)
            return returned

        return call


class _Operations(TorchDispatchMode):
    """Sees every operation of torch: gives allocations memory of the pool, and records computations."""

    def __init__(self, capture: Capture, pool: MemoryPool) -> None:
        super().__init__()
        self._capture = capture
        self._pool = pool

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        found = function(*arguments, **named)
        if function in _ALLOCATIONS and found.is_cpu and found.is_contiguous():
            return self._pool.tensor(found.shape, found.dtype)
        return self._note(function, arguments, named, found)

    def _note(self, function: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any], found: Any) -> Any:
        """Records an operation, and returns what the function gets as its result."""
        results = found if isinstance(found, (tuple, list)) else (found,)
        if not all(isinstance(result, Tensor) for result in results):
            self._capture.refuse(f"it reads values on the host: {function}")
        elif function._schema.is_mutable:
            self._record(function, arguments, named, None)
        elif not _are_views(results, arguments):
            if len(results) == 1:
                found = self._in_pool(results[0])
                self._record(function, arguments, named, found)
            else:
                self._capture.refuse(f"it has an operation with several results: {function}")
        return found

    def _record(
        self, function: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any], result: Tensor | None
    ) -> None:
        """Records the addresses of the operands; a graph keeps no memory of the pool."""
        arguments, named, result = tree_map_only(Tensor, self._pool.unkept, (arguments, named, result))
        self._capture.operation(Operation(function, arguments, named, result))

    def _in_pool(self, result: Tensor) -> Tensor:
        """Moves a result that torch has allocated to memory that other graphs may use."""
        if not (result.layout is torch.strided and result.is_cpu and result.is_contiguous()):
            return result
        return self._pool.tensor(result.shape, result.dtype).copy_(result)


def _are_views(results: Any, arguments: tuple[Any, ...]) -> bool:
    given = {_memory(tensor) for tensor in arguments if isinstance(tensor, Tensor)} - {None}
    return all(_memory(result) in given for result in results)


def _memory(tensor: Tensor) -> int | None:
    """Returns the address of a tensor; None if torch does not give one, as for oneDNN's packed weights."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


class CpuGraph:
    """A function that `capture` recorded.

    A replay reads the same tensors as the function did, with their contents at that time. `result` keeps its place
    too, and is valid until a graph of the same pool is captured or replayed.
    """

    def __init__(self, captured: Capture, result: Tensor) -> None:
        self.result = result
        self.kept = tuple(captured.kept)
        """The structures that the addresses of its calls point into, as they were when they were passed."""
        self._parts = _in_runs(captured)

    def replay(self) -> bool:
        """Computes `result` again; False if a kernel met a case that only the function handles: call that."""
        for part in self._parts:
            if isinstance(part, Operation):
                part.run()
            elif not part.run_calls():
                return False
        return True


def _in_runs(captured: Capture) -> list[CallList | Operation]:
    """Joins consecutive calls to one list."""
    parts: list[CallList | Operation] = []
    calls: list[Call] = []
    for one in captured.recorded:
        if isinstance(one, Call):
            calls.append(one)
            continue
        if calls:
            parts.append(CallList(calls, captured.kept))
        parts.append(one)
        calls = []
    return [*parts, CallList(calls, captured.kept)] if calls else parts


class Captured(NamedTuple):
    """The result of the captured run, valid as long as a graph's result, and the graph, or None and the reason.

    may_succeed: capturing another run, with other values, may give a graph.
    """

    result: Tensor
    graph: CpuGraph | None
    refused: str
    may_succeed: bool


def capture(function: Callable[[], Tensor], pool: MemoryPool, stand_ins: Mapping[int, Structure]) -> Captured:
    """Runs a function of tensors, and records a graph of it if possible.

    A graph is possible if native kernels compute nearly everything and nothing is read on the host. Tensors that the
    function makes without torch's dispatcher (from numpy's memory, say) must outlive the graph.

    pool: memory for its allocations. stand_ins: maps the id of a structure that kernels get by address to the structure
        that replays pass instead.
    """
    recording = Capture(pool, stand_ins)
    result = recording.record(function)
    if recording.refused:
        return Captured(result, None, recording.refused, recording.stopped)
    result = pool.unkept(result)
    return Captured(result, CpuGraph(recording, result), "", recording.stopped)
