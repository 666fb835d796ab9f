"""RMSNorm with a gate in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.gated_norm.implementation import GatedNormImplementation


class ReferenceGatedNorm(GatedNormImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        share = functional.silu(gate.to(wide)).reshape(x.shape)
        value = x.to(wide) * share if gate_first else x.to(wide)
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon) * weight.to(wide)
        return (value if gate_first else value * share).to(x.dtype)
