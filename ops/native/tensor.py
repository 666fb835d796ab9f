"""Which tensors the native kernels can address."""

from __future__ import annotations

import torch
from torch import Tensor


def is_rows(x: Tensor) -> bool:
    """Whether x is fp32 [rows, columns] on the CPU with dense rows; the rows may lie apart."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1 and x.is_cpu
