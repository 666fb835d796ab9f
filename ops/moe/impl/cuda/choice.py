"""The choice of experts on CUDA in Triton: one launch.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.spec import TINY

# Experts whose scores a program keeps in registers.
LARGEST = 2048


def can_choose(logits: Tensor, bias: Tensor | None) -> bool:
    """True if `cuda_choose` covers these tensors."""
    fits = logits.dim() == 2 and 0 < logits.shape[1] <= LARGEST and logits.stride(1) == 1
    return fits and (bias is None or bias.is_contiguous())


def cuda_choose(
    logits: Tensor,
    chosen: int,
    score: str,
    renormalise: bool,
    bias: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `choose_experts`; `can_choose` must hold for the arguments."""
    from vllm_gaudi_ucm.ops.moe.impl.cuda.triton.choice import choose

    rows, experts = logits.shape
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chosen, dtype=dtype, device=logits.device)
    if rows:
        choose[(rows,)](
            *(logits, bias, weights, ids, logits.stride(0), scale),
            EXPERTS=experts,
            SPREAD=1 << (experts - 1).bit_length(),
            CHOSEN=chosen,
            SIGMOID=score == "sigmoid",
            RENORMALISE=renormalise,
            TINY=TINY,
            num_warps=1 if experts <= 512 else 4,
        )
    return weights, ids
