"""Traffic between a device's memory and its on-chip memory, modelled as a cache of what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.operator_cost.operation import Access, Operation

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
