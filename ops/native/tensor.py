"""Which tensors the native kernels can address."""

from __future__ import annotations

import torch
from torch import Tensor


def is_rows(*tensors: Tensor) -> bool:
    """Whether each is fp32 [rows, columns] on the CPU with dense rows; the rows may lie apart."""
    return all(
        tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.device.type == "cpu"
        for tensor in tensors
    )
