"""RMSNorm as one call of torch, in float32."""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm


class FusedRMSNorm(RMSNorm):
    """x -> weight * x / sqrt(mean(x^2) + eps), after adding the residual if there is one.

    float32 only: in half precision vLLM keeps the sum with the residual in float32 for the norm, which takes its own
    sequence of operations.
    """

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float32 or self.variance_size_override is not None:
            return self.forward_native(x, residual)
        if residual is None:
            return self._norm(x, self.pass_weight)
        total = x + residual
        return self._norm(total, self.pass_weight_add), total

    def _norm(self, x: torch.Tensor, with_weight: bool) -> torch.Tensor:
        weight = self.weight.data if with_weight else None
        return torch.rms_norm(x, (x.shape[-1],), weight, self.variance_epsilon)


def register() -> None:
    if RMSNorm.__name__ not in op_registry_oot:
        RMSNorm.register_oot(FusedRMSNorm)
