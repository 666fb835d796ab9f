"""A captured function: runs of native calls, and the operations of torch between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure
from typing import NamedTuple

from torch import Tensor

from vllm_gaudi_ucm.ops.native.call_graph.capture import Capture, Operation
from vllm_gaudi_ucm.ops.native.call_graph.memory_pool import MemoryPool
from vllm_gaudi_ucm.ops.native.call_list import Call, CallList


class CpuGraph:
    """What `capture` recorded.

    The tensors that the function read are read again where they were, with what they hold then; `result` is where it
    was, too, and valid until a graph of the same pool is captured or replayed.
    """

    def __init__(self, captured: Capture, result: Tensor) -> None:
        self.result = result
        self._parts = _in_runs(captured)

    def replay(self) -> bool:
        """Computes `result` anew; False where a kernel found what the function itself has to look at: run that."""
        for part in self._parts:
            if isinstance(part, Operation):
                part.run()
            elif not part.run():
                return False
        return True


def _in_runs(captured: Capture) -> list[CallList | Operation]:
    """Calls that follow each other are one part."""
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
    """The result of the run that was captured, valid as long as a graph's; the graph, or None and the reason.

    may_succeed: another run may have a graph, with other values.
    """

    result: Tensor
    graph: CpuGraph | None
    refused: str
    may_succeed: bool


def capture(function: Callable[[], Tensor], pool: MemoryPool, stand_ins: Mapping[int, Structure]) -> Captured:
    """Runs a function of tensors and keeps the graph of it, where it has one.

    It has one where native kernels compute nearly all of it and nothing is read on the host. Tensors that it makes
    without torch's dispatcher (of numpy's memory, say) must outlive the graph.

    pool: for what it allocates. stand_ins: by id, structures that kernels get the address of, and those that replays
        pass in their place.
    """
    recording = Capture(pool, stand_ins)
    result = recording.run(function)
    if recording.refused:
        return Captured(result, None, recording.refused, recording.stopped)
    result = pool.unkept(result)
    return Captured(result, CpuGraph(recording, result), "", recording.stopped)
