"""RMSNorm in one pass, together with the addition of the residual, in float32."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.rms_norm.api import rms_norm
from vllm_gaudi_ucm.vllm_api.model import RMSNorm, op_registry_oot


class FusedRMSNorm(RMSNorm):
    """x -> weight * x / sqrt(mean(x^2) + eps), after adding the residual if there is one; then both are overwritten,
    as by vLLM's own kernels.

    float32 only: in half precision vLLM keeps the sum with the residual in float32 for the norm, which takes its own
    sequence of operations.
    """

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float32 or self.variance_size_override is not None:
            return self.forward_native(x, residual)
        if residual is None:
            return rms_norm(x, self.weight if self.pass_weight else None, self.variance_epsilon)
        weight = self.weight if self.pass_weight_add else None
        return rms_norm(x, weight, self.variance_epsilon, residual), residual


def register() -> None:
    if RMSNorm.__name__ not in op_registry_oot:
        RMSNorm.register_oot(FusedRMSNorm)
