"""Few rows on a Gaudi: the experts that they chose are gathered, and multiplied as one batch of matrices.

The vendor's operator visits each expert of a layer, chosen or not, and each visit costs time. Gathering writes a copy
of the chosen experts, which its products read: three times the bytes, but in a handful of kernels.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.gate import gate

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
    from vllm_gaudi_ucm.ops.moe.spec import MoeSpec

# Modelled, not measured. A user of the vendor's plugin gathered the experts of a model with 128 of them in 48 layers: a
# decode of one row took 22 instead of 50 ms.
SECONDS_PER_VISIT = 4e-6
# A Gaudi 2's. With a Gaudi 3's, gathering would pay for more rows.
BYTES_PER_SECOND = 2.45e12
MOST_BYTES = 256 << 20
"""A recipe's copy takes no more memory than this."""


def gathering_pays(rows: int, chosen: int, weights: ExpertWeights) -> bool:
    """Returns whether gathering the experts of so many rows is modelled to take less time than visiting all of them;
    false for more copies than experts.

    chosen: experts of a row.
    """
    count = len(weights.w13)
    one = sum(prod(each.shape[1:]) * each.element_size() for each in (weights.w13, weights.w2))
    gathered, read = rows * chosen * one, min(rows * chosen, count) * one
    visiting = read / BYTES_PER_SECOND + count * SECONDS_PER_VISIT
    return rows * chosen <= count and gathered <= MOST_BYTES and 3 * gathered / BYTES_PER_SECOND < visiting


def compute_gathered(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, spec: MoeSpec) -> Tensor:
    """Tensors as in `mixture_of_experts`. Products have the dtype of x, and their sum is computed in float32."""
    (rows, hidden), chosen, count = x.shape, ids.shape[1], len(weights.w13)
    numbers = ids.flatten()
    held = (numbers >= 0) & (numbers < count)
    which = numbers.clamp(0, count - 1).to(torch.int32)
    pairs = x.unsqueeze(1).expand(rows, chosen, hidden).reshape(rows * chosen, hidden, 1)
    both = torch.bmm(weights.w13.index_select(0, which), pairs).squeeze(2)
    if weights.w13_bias is not None:
        both = both + weights.w13_bias.index_select(0, which)
    found = torch.bmm(weights.w2.index_select(0, which), gate(both, spec).unsqueeze(2)).squeeze(2)
    if weights.w2_bias is not None:
        found = found + weights.w2_bias.index_select(0, which)
    # not by a share of zero: an expert that stands in for one of another device may be NaN
    weighed = (found.float() * shares.float().reshape(-1, 1)).masked_fill(~held.unsqueeze(1), 0.0)
    return weighed.view(rows, chosen, hidden).sum(1).to(x.dtype)
