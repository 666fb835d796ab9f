"""FLOPs, bytes and modelled time of a stream of operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.cost.device_figures import DeviceFigures
from vllm_gaudi_ucm.graphs.operator_cost.on_chip_memory import memory_traffic

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.operator_cost.operator_trace import OperatorTrace


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
