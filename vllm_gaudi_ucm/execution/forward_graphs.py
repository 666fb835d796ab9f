"""Forward graphs of one kind: the static tensors that they read, which of them a step runs in, and their replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.execution.static_execution import Stage
    from vllm_gaudi_ucm.execution.static_inputs import ForwardInputs, StaticInputs
    from vllm_gaudi_ucm.graphs.runners.base import GraphRunner, StaticFunction
    from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape


class ForwardGraphs:
    """Keyed by shape. Kinds differ in what their inputs have room for; one shape may have a graph in each.

    Args:
        inputs: of the steps of this kind.
        lookup: the bucket that a step runs in.
        make_runner: makes what captures and replays.
        compute: the forward over the inputs of a shape.
        stage: entered around device work.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        lookup: Callable[[Bucket], Bucket],
        make_runner: Callable[[StaticFunction], GraphRunner],
        compute: Callable[[ForwardInputs], None],
        stage: Stage,
    ) -> None:
        self.inputs = inputs
        self.lookup = lookup
        self._compute = compute
        self._stage = stage
        self._graphs = make_runner(self._run)
        self._warm: set[ForwardShape] = set()
        self._staged: tuple[torch.Tensor, ForwardShape]

    def fill(
        self, bucket: Bucket, plan: UnifiedPlan, token_ids: NDArray[np.int64], summary_blocks: NDArray[np.int64]
    ) -> None:
        """Copies a plan, padded to the bucket, to the device. See StaticInputs."""
        self._staged = self.inputs.fill(bucket, plan, token_ids, summary_blocks), bucket.forward

    def replay(self) -> None:
        """The graph of what was filled in last."""
        flat, shape = self._staged
        with self._stage("forward"):
            self._graphs.replay(shape, (flat, shape))

    def warm(self, shape: ForwardShape) -> None:
        """Captures and executes a graph over pads, once, which read and write the dummy block only."""
        if shape in self._warm:
            return
        flat = self.inputs.fill_pads(shape)
        with self._stage("forward"):
            self._graphs.capture(shape, (flat, shape))
        self._warm.add(shape)

    def captured(self) -> int:
        """Graphs that are kept."""
        return self._graphs.captured()

    def _run(self, flat: torch.Tensor, shape: ForwardShape) -> None:
        self._compute(self.inputs.split(flat, shape))
