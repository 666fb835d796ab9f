"""FLOPs, bytes and modelled time of a stream of operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.cost.specs import DeviceFigures
from vllm_gaudi_ucm.graphs.operator_cost.operator_trace import Access, Operation

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.operator_cost.operator_trace import OperatorTrace

LINE = 512 << 10


class OnChipMemory:
    """Lines of memories. Reading one that is not here, and throwing out one that was written, is traffic.

    A line of a memory that nothing will read any more is dropped for nothing. What came from outside is written back.
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
        """The memory is not used again; what was written to one from outside must get there."""
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
    """Bytes that a stream of operators moves, one after the other, with so many bytes on the chip."""
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


def _memories(operation: Operation) -> set[int]:
    return {access.memory for access in (*operation.reads, *operation.writes)}


def _lines(access: Access) -> list[tuple[int, int]]:
    first, end = access.begin // LINE, -(-access.end // LINE) if access.end > access.begin else 0
    return [(access.memory, number) for number in range(first, end)]


@dataclass(frozen=True)
class ChipFigures:
    """What the cost of a stream needs beyond DeviceFigures.

    on_chip: bytes of SRAM. vector: operations per second of the vector engines on two-byte elements.
    """

    on_chip: int
    vector: float


# Vendor's papers: 48 and 96 MB of SRAM; 11 and 28.7 TFLOPS in bfloat16, where a fused multiply-add counts as two.
CHIPS = {"gaudi2": ChipFigures(48_000_000, 5.5e12), "gaudi3": ChipFigures(96_000_000, 14.35e12)}


@dataclass(frozen=True)
class Work:
    """flops: of matrix products. bytes: to and from the device's memory. vector: elements of other arithmetic."""

    flops: float
    bytes: float
    vector: float = 0.0

    def seconds(self, device: DeviceFigures) -> float:
        """What the work cannot be faster than: the slowest of its engines, all working at once at their peaks."""
        chip = CHIPS[device.name]
        return max(self.flops / device.flops, self.bytes / device.bandwidth, self.vector / chip.vector)


@dataclass(frozen=True)
class StreamCost:
    """A stream of operators on one device.

    work: with results kept on the chip as long as there is room. touched: bytes that the operators read and write, as
    if each went to the device's memory. operators: how many there are to compile.
    """

    work: Work
    touched: int
    operators: int

    @classmethod
    def of(cls, trace: OperatorTrace, on_chip: int) -> StreamCost:
        """on_chip: bytes of SRAM."""
        operations = trace.operations
        work = Work(
            float(sum(operation.matrix for operation in operations)),
            float(memory_traffic(trace, on_chip)),
            sum(operation.vector for operation in operations),
        )
        touched = sum(access.used for o in operations for access in (*o.reads, *o.writes))
        return cls(work, touched, len(operations))
