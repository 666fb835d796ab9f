"""The gated activation in one pass, in float32."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.silu_and_mul.api import silu_and_mul
from vllm_gaudi_ucm.vllm_api.model import SiluAndMul, op_registry_oot


class FusedSiluAndMul(SiluAndMul):
    """x -> silu(x[:d]) * x[d:]."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)


def register() -> None:
    if SiluAndMul.__name__ not in op_registry_oot:
        SiluAndMul.register_oot(FusedSiluAndMul)
