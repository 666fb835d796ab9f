"""Packed linear layers on CPU through oneDNN, which torch carries.

Why: on CPUs that torch's default BLAS has no fast path for, `torch.nn.functional.linear` in fp32 reached a third of
this (all of SmolLM2-135M's weights once, one thread of an AVX-512 core: 16 rows 100 ms against 34 ms, 1024 rows 4.8 s
against 1.0 s, 1 row 38 ms against 17 ms).
"""

from __future__ import annotations

from typing import NewType

import torch
from torch import Tensor

PackedWeight = NewType("PackedWeight", Tensor)
"""An opaque reordered weight; only `packed_linear` can read it."""

# oneDNN chooses the block layout for a number of rows; of 1, 16, 256 and unknown, 16 was the best over 1 to 1024 rows.
PACK_FOR_ROWS = 16


def can_pack(weight: Tensor) -> bool:
    """Whether this torch and this CPU multiply a weight of this dtype and device fast when it is packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> PackedWeight:
    """Reorders a weight [out features, in features] for which `can_pack` holds. A copy: the weight may be freed."""
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACK_FOR_ROWS))


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in features] times the weight's transpose, plus bias [out features]; the result has the dtype of x."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
