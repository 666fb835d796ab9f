"""`FusedRMSNorm`."""

import torch
from torch import Tensor


class FusedRMSNorm(torch.autograd.Function):
    """Called as `FusedRMSNorm.apply(...)`; there is no gradient here."""

    @staticmethod
    def forward(
        ctx: object,
        data_in: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> Tensor:
        """Normalised data_in times gamma, in data_in's dtype. use_stages, bwd_mode: of the gradient; fast_math: speed.

        data_in: bf16 or f32 [batch, tokens, hidden]; gamma: [hidden], the same dtype.
        """
        return torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
