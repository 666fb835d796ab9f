"""Runs steps at their true shapes without padding; on a CPU, small steps run as graphs of native calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput
from vllm_gaudi_ucm.execution.attention_group import StepMetadata, step_metadata
from vllm_gaudi_ucm.execution.decoder import HIDDEN, Decoder, DecoderStep
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
from vllm_gaudi_ucm.execution.step_tensors import StepInputs
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.planned_step import PlannedStep
    from vllm_gaudi_ucm.config.sections import AttentionConfig
    from vllm_gaudi_ucm.distributed.stage import Stage
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
    from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


class TrueShapeExecution:
    """Runs steps at their true shapes; see Execution.

    Args:
        config: kernels of attention, and how the unique part reads the cache.
        sparse: a sparse method, if one is on.
        carried: tokens that the host may not know yet when a step is copied to the device; None if it knows all.
        groups: groups of the KV cache; None for one group with all layers.

    Raises:
        ValueError: the kernels are not for this device, or cannot be built here.
    """

    # rows whose logits are computed in one call: all logits of a long prompt at once would take gigabytes
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
        carried: CarriedTokens | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        self._carried = carried
        self._groups = groups or LayerGroups.alone(block_size, decoder.window)
        self._decoder = decoder
        self._implementation = _checked(config.implementation, device, decoder.specs)
        self._graphs = graphs
        self._block_size = block_size
        self._device = device
        self._sparse = sparse
        limits = None if sparse is None else sparse.limits
        # at a fixed address, which graphs of native calls contain
        self._room = (
            None if limits is None else torch.zeros(limits.max_selected_blocks, dtype=torch.int64, device=device)
        )
        self._tensors = TrueShapeTensors(device, config.contiguous_pa, limits, self._groups.groups, decoder.inputs)
        self._inputs: StepInputs
        self._metadata: StepMetadata
        self._selection: LayerSelection | None = None
        # blocks to be summarised after the layers
        self._full_blocks: torch.Tensor | None = None
        self._hidden: torch.Tensor
        self._lockstep = decoder.lockstep
        # rows of the longest step of all engines that share out experts
        self._rows: int | None = None

    def divide(self, batch: BatchInput, remainders: NDArray[np.int64] = NO_REMAINDERS) -> list[NDArray[np.int64]]:
        return self._groups.divide(batch, [np.arange(len(batch.num_scheduled))], None)

    def stage(self, step: PlannedStep) -> StepShape:
        plan = step.plan
        if self._lockstep is not None:
            (self._rows,) = self._lockstep.agree([plan.num_rows])
        inputs, shape = self._tensors.stage(step)
        if self._carried is not None and step.inputs["token_ids"].min() < 0:
            inputs = inputs.with_tokens(self._carried.fill_in(inputs.token_ids))
        self._inputs, self._full_blocks = inputs, None
        in_layers = inputs.summary_blocks
        if self._graphs is not None and self._sparse is not None and self._sparse.summarises_behind(plan.selection):
            # the step then uses the graph of a dense engine
            self._full_blocks, in_layers = inputs.summary_blocks, None
        metadata = step_metadata(
            inputs.slots,
            inputs.parts,
            self._block_size,
            self._implementation,
            sparse=self._sparse,
            summary_blocks=in_layers,
            selection=inputs.selection,
            reused=plan.selection is not None and bool((plan.selection.modes == SelectionMode.REUSE).all()),
            room=self._room,
            latent=self._decoder.latent,
            chosen=self._decoder.chosen,
        )
        self._selection = metadata.selection
        self._metadata = self._groups.metadata(metadata, inputs, self._implementation)
        return StepShape(shape, shape, chosen=self._decoder.chosen if metadata.chooses else 0)

    def forward(self) -> None:
        inputs, metadata = self._inputs, self._metadata
        if self._sparse is not None:
            self._sparse.begin_forward(self._selection)
        if self._decoder.stage is not None:
            self._run_stage(self._decoder.stage, inputs, metadata)
        elif self._graphs is None or isinstance(metadata, GroupedMetadata):
            # a native graph contains the plan of one group
            self._hidden = self._decoder.hidden(DecoderStep(inputs.rows, metadata, longest=self._rows))
        else:
            # a step without choices uses the graphs of a dense engine
            counters = None if self._sparse is None or self._selection is None else self._sparse.counters
            self._hidden = self._graphs.hidden(inputs, metadata, counters)
        if self._sparse is not None:
            self._sparse.end_forward(self._selection, self._full_blocks)

    def follow(self) -> None:
        assert self._lockstep is not None, "no other engines"
        (rows,) = self._lockstep.agree([0])
        if rows:
            # a model cannot compute without rows
            self._decoder.run_layers(self._decoder.unattended(1, self._device, longest=rows))

    def _run_stage(self, stage: Stage, inputs: StepInputs, metadata: StepMetadata) -> None:
        received = self._decoder.received(len(inputs.token_ids), self._device)
        if received is not None:
            stage.receive(received)
        found = self._decoder.run_layers(DecoderStep(inputs.rows, metadata, received))
        if stage.is_last:
            self._hidden = found[HIDDEN]
        else:
            stage.send(found)

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        if len(rows) == len(self._hidden) and np.array_equal(rows, np.arange(len(rows))):
            return self._decoder.logits(self._hidden)
        return self._decoder.logits(self._hidden, torch.from_numpy(rows).to(self._device))

    def hidden_states(self, count: int) -> torch.Tensor:
        return self._hidden

    def likeliest(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        return self.logits(rows).argmax(-1) if len(rows) <= self.max_logits else None


def _checked(implementation: str, device: torch.device, specs: list[AttentionSpec]) -> str:
    """Checks the implementation at start, because an error in a request's step would end the engine."""
    try:
        chosen = choose_implementation(implementation, device.type, specs)
    except ValueError as error:
        raise ValueError(f"ucm.attention.implementation: {error}") from error
    return implementation if all(spec.is_plain for spec in specs) else chosen
