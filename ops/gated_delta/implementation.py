"""The interface of an implementation of the gated delta rule, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import functional

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

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors as in `delta_gates`."""
        steps = functional.softplus(a.float().flatten(1) + bias.float())
        return -a_log.float().exp() * steps, b.float().flatten(1).sigmoid()


GATED_DELTAS: Implementations[DeltaImplementation] = Implementations(
    "gated_delta",
    "vllm_gaudi_ucm.gated_delta_implementations",
    reference="vllm_gaudi_ucm.ops.gated_delta.impl.reference:ReferenceDelta",
    tiled="vllm_gaudi_ucm.ops.gated_delta.impl.tiled:TiledDelta",
    cuda="vllm_gaudi_ucm.ops.gated_delta.impl.cuda.update:CudaDelta",
)
