"""Work of a card: its time at the vendor's peaks, and the least of a step, with which operators are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.graphs.cost.specs import DeviceSpec, ModelSpec


@dataclass(frozen=True)
class ChipSpec:
    """Figures of a card, beyond `DeviceSpec`, for the cost of a stream of operators.

    on_chip: bytes of SRAM. vector: operations per second of the vector engines on two-byte elements.
    """

    on_chip: int
    vector: float


# Vendor's papers: 48 and 96 MB of SRAM; 11 and 28.7 TFLOPS in bfloat16, where a fused multiply-add counts as two.
CHIPS = {"gaudi2": ChipSpec(48_000_000, 5.5e12), "gaudi3": ChipSpec(96_000_000, 14.35e12)}


@dataclass(frozen=True)
class Work:
    """flops: of matrix products. bytes: to and from the device's memory. vector: elements of other arithmetic."""

    flops: float
    bytes: float
    vector: float = 0.0

    def seconds(self, device: DeviceSpec) -> float:
        """A lower bound of the time: that of the slowest engine, all working at once at their peaks."""
        chip = CHIPS[device.name]
        return max(self.flops / device.flops, self.bytes / device.bandwidth, self.vector / chip.vector)


def least_work(plan: UnifiedPlan, model: ModelSpec) -> Work:
    """The least work of any implementation, in one layer.

    Each (row, token) pair is multiplied twice; each token of the cache, each new token and each row is read, and each
    result is written, once.
    """
    new = np.diff(plan.query_start)
    new = new[new > 1]
    pairs = int((new * (new + 1) // 2).sum())
    cached = 0
    if plan.unique is not None:
        pairs += int(plan.unique.hi.sum())
        cached += int(plan.unique.hi.sum())
    if plan.shared is not None:
        pairs += int(plan.shared.hi[plan.row_requests].sum())
        cached += int(plan.shared.hi.max(0).sum())
    return _work(model, plan.num_rows, pairs, cached + int(new.sum()))


def full_work(phase: str, rows: int, shared: int, unique: int, block_size: int, model: ModelSpec) -> Work:
    """The same of a step that fills a bucket: one prompt, and every row sees every shared block."""
    causal = rows * (rows + 1) // 2 if "c" in phase else 0
    pairs = causal + (rows * shared + unique) * block_size
    return _work(model, rows, pairs, (shared + unique) * block_size + (rows if causal else 0))


def _work(model: ModelSpec, rows: int, pairs: int, tokens: int) -> Work:
    both = model.head_dim + model.value_dim
    elements = rows * model.heads * both + tokens * model.kv_elements
    return Work(2.0 * model.heads * both * pairs, float(elements * model.dtype_bytes))
