"""Rejection sampling on CUDA in Triton: one launch, which reads each number once.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, WARPS = 4096, 8  # tokens that a program reads at once, and the program's warps


def can_accept_or_draw(
    probabilities: Tensor, drafts: Tensor, draft_probabilities: Tensor, uniform: Tensor, noise: Tensor
) -> bool:
    """True if `cuda_accept_or_draw` covers these tensors."""
    numbers = (probabilities, draft_probabilities, uniform, noise)
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in numbers)
    return is_plain and drafts.dtype == torch.int64 and drafts.is_contiguous() and probabilities.shape[1] > 0


def cuda_accept_or_draw(
    probabilities: Tensor, drafts: Tensor, draft_probabilities: Tensor, uniform: Tensor, noise: Tensor
) -> Tensor:
    """See `accept_or_draw`; `can_accept_or_draw` must hold for the arguments."""
    from vllm_gaudi_ucm.ops.rejection_sampling.impl.cuda.triton.rejection import accept_rows

    rows, vocab_size = probabilities.shape
    tokens = torch.empty_like(drafts)
    if rows:
        accept_rows[(rows,)](
            *(probabilities, drafts, draft_probabilities, uniform, noise, tokens),
            VOCAB=vocab_size,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return tokens
