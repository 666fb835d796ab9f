"""Steps at their true shapes: no padding; on a CPU, small ones as graphs of native calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS
from vllm_gaudi_ucm.execution.decoder import step_metadata
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.step_tensors import NO_BLOCKS, StepInputs, TrueShapeTensors
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.native.call_graph.call_graph import CpuGraph, capture
from vllm_gaudi_ucm.ops.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation
from vllm_gaudi_ucm.ops.unified_attention.impl.native import NativePlan, RecordedPlan
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.config.ucm_config import AttentionConfig
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.observability.room_metrics import NativeGraphMetrics
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


class TrueShapeExecution:
    """See Execution.

    Args:
        decoder: the model.
        config: kernels of attention, and how the unique part reads the cache.
        block_size: tokens per cache block.
        device: where the model runs.
        sparse: a sparse method, where one is on.
        graphs: of small steps, on a CPU.
        by_token: each token has a slot of its own.

    Raises:
        ValueError: kernels that are not for this device, or cannot be built here.
    """

    # rows whose logits are computed in one call: all logits of a long prompt at once would be gigabytes
    max_logits = 1024

    def __init__(
        self,
        decoder: Decoder,
        config: AttentionConfig,
        block_size: int,
        device: torch.device,
        sparse: SparseWorker | None = None,
        graphs: NativeGraphs | None = None,
        *,
        by_token: bool = False,
    ) -> None:
        self._decoder = decoder
        self._implementation = _checked(config.implementation, device)
        self._graphs = graphs
        self._block_size = block_size
        self._device = device
        self._sparse = sparse
        limits = None if sparse is None else sparse.limits
        self._tensors = TrueShapeTensors(device, config.contiguous_pa, limits, by_token=by_token)
        self._inputs: StepInputs
        self._metadata: UnifiedAttentionMetadata
        self._hidden: torch.Tensor

    def divide(self, batch: BatchInput, remainders: NDArray[np.int64] = NO_REMAINDERS) -> list[NDArray[np.int64]]:
        return [np.arange(len(batch.num_scheduled))]

    def stage(
        self, plan: UnifiedPlan, token_ids: NDArray[np.int64], summary_blocks: NDArray[np.int64] = NO_BLOCKS
    ) -> StepShape:
        inputs, shape = self._tensors.stage(plan, token_ids, summary_blocks)
        self._inputs = inputs
        self._metadata = step_metadata(
            inputs.slots,
            inputs.parts,
            self._block_size,
            self._implementation,
            self._sparse,
            inputs.summary_blocks,
            inputs.selection,
            reused=plan.selection is not None and bool((plan.selection.modes == SelectionMode.REUSE).all()),
        )
        return StepShape(shape, shape)

    def forward(self) -> None:
        inputs, metadata = self._inputs, self._metadata
        if self._sparse is not None:
            self._sparse.begin_forward(metadata.selection)
        if self._graphs is None:
            self._hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, metadata)
        else:
            self._hidden = self._graphs.hidden(inputs, metadata)
        if self._sparse is not None:
            self._sparse.end_forward(metadata.selection)

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        hidden = self._hidden
        if not (len(rows) == len(hidden) and np.array_equal(rows, np.arange(len(rows)))):
            hidden = hidden.index_select(0, torch.from_numpy(rows).to(self._device))
        return self._decoder.logits(hidden)


def _checked(implementation: str, device: torch.device) -> str:
    """Now, at start: in a step of some request the error would end the engine."""
    try:
        choose_implementation(implementation, device.type)
    except ValueError as error:
        raise ValueError(f"ucm.attention.implementation: {error}") from error
    return implementation


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

    A number of rows that comes for the first time runs operator by operator and is recorded; the second time it runs
    both ways, and a graph that gives other bits is not used. A model that does not run in native kernels has no graphs.

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

    def hidden(self, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
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

    def _run(self, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
        self._metrics.ordinary()
        return self._decoder.hidden(step.token_ids, step.positions, metadata)

    def _capture(self, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
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

    def _check(self, graph: _Graph, step: StepInputs, metadata: UnifiedAttentionMetadata) -> torch.Tensor:
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

    def _replay(self, graph: _Graph, step: StepInputs, plan: NativePlan) -> bool:
        self._fill(step)
        graph.plan.bind(plan)
        return graph.graph.replay()

    def _fill(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's token ids, positions and slots where graphs read them."""
        rows = len(step.token_ids)
        fixed = self._token_ids[:rows], self._positions[:rows], self._slots[:rows]
        for to, given in zip(fixed, (step.token_ids, step.positions, step.slots), strict=True):
            to.copy_(given)
        return fixed


def _bits(values: torch.Tensor) -> torch.Tensor:
    """NaN is not equal to itself, its bits are."""
    return values.contiguous().view(torch.uint8)
