"""Noise of rows on CUDA in Triton: one launch, which writes the noise and reads no tensor of its size.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, WARPS = 2048, 8  # elements of a program, and the program's warps


def cuda_noise(keys: Tensor, mixes: Tensor) -> Tensor:
    """See `exponential_noise`."""
    from vllm_gaudi_ucm.ops.row_noise.impl.cuda.triton import noise as kernels

    noise = torch.empty(len(keys), len(mixes), device=keys.device)
    if noise.numel():
        pieces = -(-len(mixes) // BLOCK)
        kernels.draw_rows[(len(keys) * pieces,)](keys, mixes, noise, VOCAB=len(mixes), BLOCK=BLOCK, num_warps=WARPS)
    return noise
