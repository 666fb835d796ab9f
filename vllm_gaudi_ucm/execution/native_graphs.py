"""Small steps on a CPU as graphs of native calls: most of a decode of a small model is Python otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.native.call_graph.call_graph import CpuGraph, capture
from vllm_gaudi_ucm.ops.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.unified_attention.impl.native import NativePlan, RecordedPlan

if TYPE_CHECKING:
    from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.execution.staging import StagedStep
    from vllm_gaudi_ucm.observability.room_metrics import NativeGraphMetrics

# Python is little of a larger step, and its linear layers may be oneDNN's.
MOST_ROWS = 64
# So many numbers of rows without one graph: the model has none.
HOPELESS = 4

logger = plugin_logger(__name__)


@dataclass
class _Graph:
    """A graph, the plan that it attends by, and whether it has given the bits of the ordinary way once."""

    graph: CpuGraph
    plan: RecordedPlan
    checked: bool = False


class NativeGraphs:
    """Hidden states of steps of up to `MOST_ROWS` rows; one graph for each number of rows.

    A number of rows that comes for the first time runs as ever and is recorded; the second time it runs both ways, and
    a graph that gives other bits is not used. A model that does not run in native kernels has no graphs.

    Args:
        decoder: the model.
        metrics: where steps are counted.
    """

    def __init__(self, decoder: Decoder, metrics: NativeGraphMetrics) -> None:
        self._decoder = decoder
        self._metrics = metrics
        self._pool = MemoryPool()
        self._graphs: dict[int, _Graph] = {}
        self._refused: set[int] = set()
        # what graphs read: the same memory in every step
        self._token_ids, self._positions, self._slots = torch.zeros(3, MOST_ROWS, dtype=torch.int64)

    def hidden(self, step: StagedStep, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        """[rows, hidden size], valid until the next call; writes the step's K/V."""
        rows, parts = len(step.token_ids), metadata.parts
        if rows > MOST_ROWS or metadata.sparse is not None or parts.implementation.name != "native":
            return self._run(step, metadata)
        graph = self._graphs.get(rows)
        if graph is None:
            return self._capture(step, metadata) if self._may_have_graph(rows) else self._run(step, metadata)
        if not graph.checked:
            return self._check(graph, step, metadata)
        if not self._replay(graph, step, parts.plan):
            return self._run(step, metadata)
        self._metrics.replayed()
        return graph.graph.result

    def _may_have_graph(self, rows: int) -> bool:
        return rows not in self._refused and (bool(self._graphs) or len(self._refused) < HOPELESS)

    def _run(self, step: StagedStep, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        self._metrics.ordinary()
        return self._decoder.hidden(step.token_ids, step.positions, metadata)

    def _capture(self, step: StagedStep, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        token_ids, positions, slots = self._fill(step)
        fixed = replace(metadata, slots=slots)
        plan = RecordedPlan(metadata.parts.plan)
        found = capture(lambda: self._decoder.hidden(token_ids, positions, fixed), self._pool, plan.stand_ins)
        rows = len(token_ids)
        if found.graph is None:
            self._metrics.ordinary()
            if not found.may_succeed:
                self._refuse(rows, f"it has no graph on this CPU: {found.refused}")
        else:
            self._metrics.captured()
            plan.recorded(metadata.parts.plan, rows)
            self._graphs[rows] = _Graph(found.graph, plan)
        return found.result

    def _check(self, graph: _Graph, step: StagedStep, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        """Runs a step both ways, the ordinary one last: that counts."""
        replayed = graph.graph.result.clone() if self._replay(graph, step, metadata.parts.plan) else None
        hidden = self._run(step, metadata)
        if replayed is not None:
            graph.checked = torch.equal(_bits(replayed), _bits(hidden))
            if not graph.checked:
                del self._graphs[len(hidden)]
                self._refuse(len(hidden), "its graph gave other values than the model")
        return hidden

    def _refuse(self, rows: int, reason: str) -> None:
        if not self._refused:
            logger.info("Steps of %d rows run the ordinary way, and maybe others: %s", rows, reason)
        self._refused.add(rows)

    def _replay(self, graph: _Graph, step: StagedStep, plan: NativePlan) -> bool:
        self._fill(step)
        graph.plan.bind(plan)
        return graph.graph.replay()

    def _fill(self, step: StagedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's token ids, positions and slots where graphs read them."""
        rows = len(step.token_ids)
        fixed = self._token_ids[:rows], self._positions[:rows], self._slots[:rows]
        for to, given in zip(fixed, (step.token_ids, step.positions, step.slots), strict=True):
            to.copy_(given)
        return fixed


def _bits(values: torch.Tensor) -> torch.Tensor:
    """NaN is not equal to itself, its bits are."""
    return values.contiguous().view(torch.uint8)
