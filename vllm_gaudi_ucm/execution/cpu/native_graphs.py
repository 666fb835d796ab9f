"""Graphs of native calls, for small steps at their true shapes on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.execution.decoder import DecoderStep
from vllm_gaudi_ucm.execution.step_tensors import StepInputs
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import RecordedSelection
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import CpuGraph, capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.native import NativePlan, RecordedPlan
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.row_input import RowInput
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.observability.room_metrics import NativeGraphMetrics

# Python takes little of the time of a larger step, and its linear layers may use oneDNN.
MOST_ROWS = 64
# If no graph was made for this many numbers of rows, the model has none.
MAX_REFUSED = 4

logger = plugin_logger(__name__)


class _Key(NamedTuple):
    """rows: rows of a step. selects: whether some of its blocks are chosen."""

    rows: int
    selects: bool


@dataclass
class _Graph:
    """A graph, the plan and the choices by which it attends, and whether its result was bitwise equal to the
    model's.
    """

    graph: CpuGraph
    plan: RecordedPlan
    selection: RecordedSelection
    checked: bool = False


class NativeGraphs:
    """Computes hidden states of steps of up to `MOST_ROWS` rows. There is one graph for each number of rows, and
    another one for steps of this size with chosen blocks. Full blocks are summarised outside graphs.

    The first step with a number of rows runs operator by operator and is recorded. The second one runs both ways, and
    the graph is not used if its result differs in any bit. A model that does not run in native kernels has no graphs.

    Args:
        decoder: the model.
        metrics: count the steps.
    """

    def __init__(self, decoder: Decoder, metrics: NativeGraphMetrics) -> None:
        self._decoder = decoder
        self._metrics = metrics
        self._pool = MemoryPool()
        self._graphs: dict[_Key, _Graph] = {}
        self._refused: set[_Key] = set()
        # inputs of graphs: the same memory in every step
        self._rows = {kind.name: _for_most_rows(kind) for kind in decoder.inputs}
        self._slots = torch.zeros(MOST_ROWS, dtype=torch.int64)

    def hidden(
        self, step: StepInputs, metadata: UnifiedAttentionMetadata, counters: tuple[torch.Tensor, ...] | None = None
    ) -> torch.Tensor:
        """Returns [rows, hidden size], valid until the next call; writes the step's K/V.

        counters: tensors to which choices of blocks add; if None, choices need more than native calls, and have no
        graphs.
        """
        selection = metadata.selection
        if not self._is_recordable(step, metadata, counters):
            return self._run(step, metadata)
        key = _Key(len(step.token_ids), selection is not None)
        graph = self._graphs.get(key)
        if graph is None:
            return self._capture(key, step, metadata) if self._may_have_graph(key) else self._run(step, metadata)
        if not graph.checked and selection is not None and _compares_choices(selection.tensors.modes):
            # a second comparison would find the choice that the first one has stored, and count it as kept
            return self._run(step, metadata)
        if not graph.checked:
            return self._check(key, graph, step, metadata, () if selection is None else counters or ())
        if not self._replay(graph, step, metadata):
            return self._run(step, metadata)
        self._metrics.replayed()
        return graph.graph.result

    def _is_recordable(
        self, step: StepInputs, metadata: UnifiedAttentionMetadata, counters: tuple[torch.Tensor, ...] | None
    ) -> bool:
        if len(step.token_ids) > MOST_ROWS or metadata.parts.implementation.name != "native":
            return False
        if metadata.sparse is None:
            return True
        selection = metadata.selection
        if counters is None or metadata.summary_blocks is not None or selection is None:
            return False
        return selection.native is not None and selection.room is not None

    def _may_have_graph(self, key: _Key) -> bool:
        return key not in self._refused and (bool(self._graphs) or len(self._refused) < MAX_REFUSED)

    def _run(self, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        self._metrics.ordinary()
        return self._decoder.hidden(DecoderStep(step.rows, metadata))

    def _capture(self, key: _Key, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        rows, slots = self._fill(step)
        fixed = DecoderStep(rows, replace(metadata, slots=slots))
        plan = RecordedPlan(metadata.parts.plan)
        found = capture(lambda: self._decoder.hidden(fixed), self._pool, plan.stand_ins)
        if found.graph is None:
            self._metrics.ordinary()
            if not found.may_succeed:
                self._refuse(key, f"it has no graph on this CPU: {found.refused}")
        else:
            self._metrics.captured()
            plan.recorded(metadata.parts.plan, key.rows)
            self._graphs[key] = _Graph(found.graph, plan, RecordedSelection(found.graph.kept))
        return found.result

    def _check(
        self,
        key: _Key,
        graph: _Graph,
        step: StepInputs,
        metadata: UnifiedAttentionMetadata,
        counters: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Runs a step both ways, the ordinary one last, whose result is used. Storing a choice twice does not change
        it.
        """
        states = self._decoder.states
        # a draft head reads the places behind which it writes
        changed = counters if states is None else (*counters, states.values)
        before = [tensor.clone() for tensor in changed]
        replayed = graph.graph.result.clone() if self._replay(graph, step, metadata) else None
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        hidden = self._run(step, metadata)
        if replayed is not None:
            graph.checked = torch.equal(_bits(replayed), _bits(hidden))
            if not graph.checked:
                del self._graphs[key]
                self._refuse(key, "its graph gave other values than the model")
        return hidden

    def _refuse(self, key: _Key, reason: str) -> None:
        if not self._refused:
            logger.info("Steps of %d rows run the ordinary way, and maybe others: %s", key.rows, reason)
        self._refused.add(key)

    def _replay(self, graph: _Graph, step: StepInputs, metadata: UnifiedAttentionMetadata) -> bool:
        self._fill(step)
        plan: NativePlan = metadata.parts.plan
        graph.plan.bind(plan)
        if metadata.selection is not None and metadata.selection.native is not None:
            graph.selection.bind(metadata.selection.native)
        return graph.graph.replay()

    def _fill(self, step: StepInputs) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Copies the step's row inputs and slots to the graphs' input memory, and returns them."""
        count = len(step.slots)
        slots, fixed = self._slots[:count], {name: whole[..., :count] for name, whole in self._rows.items()}
        for name, to in fixed.items():
            to.copy_(step.rows[name])
        return fixed, slots.copy_(step.slots)


def _for_most_rows(kind: type[RowInput]) -> torch.Tensor:
    return torch.zeros(kind.shape(MOST_ROWS), dtype=torch.from_numpy(np.zeros(0, kind.dtype)).dtype)


def _compares_choices(modes: torch.Tensor) -> bool:
    return bool((modes == SelectionMode.CHECK).any())


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the bits of values, because NaN is not equal to itself."""
    return values.contiguous().view(torch.uint8)
