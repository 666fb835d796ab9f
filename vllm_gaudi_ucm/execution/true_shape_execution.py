"""Steps at their true shapes: no padding and no graphs, which is the fastest way on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.batch.batch_plan import NO_TAILS
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.step_metadata import step_metadata
from vllm_gaudi_ucm.execution.step_tensors import NO_BLOCKS, StepInputs, TrueShapeTensors
from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.config.ucm_config import AttentionConfig
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.execution.native_graphs import NativeGraphs
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
    ) -> None:
        self._decoder = decoder
        self._implementation = _checked(config.implementation, device)
        self._graphs = graphs
        self._block_size = block_size
        self._device = device
        self._sparse = sparse
        limits = None if sparse is None else sparse.limits
        self._tensors = TrueShapeTensors(device, config.contiguous_pa, limits)
        self._inputs: StepInputs
        self._metadata: UnifiedAttentionMetadata
        self._hidden: torch.Tensor

    def divide(self, batch: BatchInput, tails: NDArray[np.int64] = NO_TAILS) -> list[NDArray[np.int64]]:
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
        if self._graphs is None:
            self._hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, metadata)
        else:
            self._hidden = self._graphs.hidden(inputs, metadata)

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
