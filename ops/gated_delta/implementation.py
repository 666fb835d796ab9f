"""The interface of an implementation of the gated delta rule, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.state_rows import StateRows


class DeltaRows(NamedTuple):
    """A layer's inputs of each row, see `gated_delta`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class DeltaImplementation(Implementation[None], ABC):
    """One way to compute the gated delta rule."""

    @abstractmethod
    def scan(self, rows: DeltaRows, states: Tensor, step: StateRows, *, normalise: bool) -> Tensor:
        """Tensors as in `gated_delta`, validated."""


GATED_DELTAS: Implementations[DeltaImplementation] = Implementations(
    "gated_delta",
    "vllm_gaudi_ucm.gated_delta_implementations",
    reference="vllm_gaudi_ucm.ops.gated_delta.impl.reference:ReferenceDelta",
    tiled="vllm_gaudi_ucm.ops.gated_delta.impl.tiled:TiledDelta",
    cuda="vllm_gaudi_ucm.ops.gated_delta.impl.cuda.update:CudaDelta",
)
