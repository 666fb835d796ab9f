"""Gaudi's fused kernels as `gaudi-ucm op-cost` counts them: operators on tensors without memory, their work modelled.

Both keep scores on the chip. FusedSDPA goes over the keys and values of one kv head, which stay in SRAM meanwhile (4 MB
for 8192 tokens of 128), for all rows of its heads: as in FlashAttention (Dao et al. 2022), queries, keys, values and
mask are read once, results are written once, and a causal call multiplies half of the pairs. A score takes four
operations of the vector engines in two bytes (maximum, difference, exponential, sum), one more to add a mask to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vllm_gaudi_ucm.graphs.operator_cost.operator_trace import VECTOR_WORK
from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_kernels

SOFTMAX_OPERATIONS = 4
# softmax_fa2 is a Gaudi 3's, FusedSDPA both have.
WITH_SOFTMAX = ("gaudi3",)

_library = torch.library.Library("gaudi_ucm_op_cost", "DEF")
_library.define("fused_sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal) -> Tensor")
_library.define("softmax_fa2(Tensor scores, Tensor before, Tensor total) -> (Tensor, Tensor, Tensor, Tensor)")


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """While it is entered, the hpu implementation finds the kernels that such a card has."""
    softmax = _softmax if device in WITH_SOFTMAX else None
    with patch.object(hpu_kernels, "FUSED_SDPA", _sdpa), patch.object(hpu_kernels, "SOFTMAX_FA2", softmax):
        yield


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False, *_: Any
) -> Tensor:
    """As `FusedSDPA.apply` is called."""
    result: Tensor = torch.ops.gaudi_ucm_op_cost.fused_sdpa(q, k, v, mask, causal)
    return result


def _softmax(scores: Tensor, inputM: Tensor, inputL: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `torch.ops.hpu.softmax_fa2` is called."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.gaudi_ucm_op_cost.softmax_fa2(scores, inputM, inputL)
    return result


def _sdpa_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _softmax_shape(scores: Tensor, before: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top, summed, fixup = (torch.empty_like(before) for _ in range(3))
    return torch.empty_like(scores), top, summed, fixup


_library.impl("fused_sdpa", _sdpa_shape, "Meta")
_library.impl("softmax_fa2", _softmax_shape, "Meta")


@register_flop_formula(torch.ops.gaudi_ucm_op_cost.fused_sdpa)
def _sdpa_flops(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, out_shape: Any = None, **_: Any) -> int:
    """Of shapes: [batch, heads, rows, dim], [batch, kv_heads, keys, dim]."""
    batch, heads, rows, dim = q
    return int(2 * batch * heads * rows * k[2] * (dim + v[3])) // (2 if is_causal else 1)


def _sdpa_vector(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> float:
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (2 if is_causal else 1)
    return float(scores * (SOFTMAX_OPERATIONS + (mask is not None)))


def _softmax_vector(scores: Tensor, before: Tensor, total: Tensor) -> float:
    return float(SOFTMAX_OPERATIONS * scores.numel())


VECTOR_WORK[torch.ops.gaudi_ucm_op_cost.fused_sdpa] = _sdpa_vector
VECTOR_WORK[torch.ops.gaudi_ucm_op_cost.softmax_fa2] = _softmax_vector
