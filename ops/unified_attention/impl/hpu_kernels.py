"""Gaudi's fused kernels, where this machine has them: None elsewhere, and torch's operators compute the same."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

FusedSoftmax = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

ROWS_PER_VECTOR, VECTOR = 8, 128
# Stands for "no maximum yet". With -inf, a row that sees nothing would be exp(-inf - -inf).
LOWEST = torch.finfo(torch.bfloat16).min


def find_softmax() -> FusedSoftmax | None:
    """`torch.ops.hpu.softmax_fa2`: its presence tells the software, which must be 1.24 or newer; a Gaudi 3 only."""
    try:
        device = import_module("habana_frameworks.torch.utils.experimental")
    except ImportError:
        return None
    if "Gaudi3" not in str(device._get_device_type()):
        return None
    return getattr(torch.ops.hpu, "softmax_fa2", None)


def find_sdpa() -> Callable[..., Tensor] | None:
    """`FusedSDPA.apply`: attention without a log-sum-exp."""
    try:
        kernels: Any = import_module("habana_frameworks.torch.hpex.kernels")
    except ImportError:
        return None
    apply: Callable[..., Tensor] = kernels.FusedSDPA.apply
    return apply


# Looked up once, when this module is first imported: inside of a compiled graph it would be a break.
SOFTMAX_FA2 = find_softmax()
FUSED_SDPA = find_sdpa()


def fused_softmax(scores: Tensor, kernel: FusedSoftmax) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 weights and float32 maxima and sums of bfloat16 scores [..., rows, groups, keys].

    The kernel's maximum is one of the scores, so it is exact. Its sum is rounded to bfloat16, so it is not used.
    """
    rows = scores.flatten(-3, -2)
    padded = -(-rows.shape[-2] // ROWS_PER_VECTOR) * VECTOR
    lowest = rows.new_full((*rows.shape[:-2], padded), LOWEST)
    weights, tops, _, _ = kernel(rows, inputM=lowest, inputL=torch.zeros_like(lowest))
    # eight rows stand at the beginning of each vector
    top = tops.unflatten(-1, (-1, VECTOR))[..., :ROWS_PER_VECTOR].flatten(-2)[..., : rows.shape[-2]].float()
    top = top.masked_fill(top == LOWEST, float("-inf"))
    total = weights.float().sum(-1)
    return weights.view(scores.shape), top.view(scores.shape[:-1]), total.view(scores.shape[:-1])
