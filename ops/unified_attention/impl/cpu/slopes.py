"""Slopes (ALiBi) for torch's CPU flash kernel: a bias of each head, in pieces whose memory is bounded.

Tokens that all rows of a call see get one bias for all rows, by the distance from the last of these tokens. The rest of
a row's distance is the same for all of its scores, so it changes only the logarithm of their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.plan import MASK_ELEMENTS, BlockCall, CausalCall


class HeadBias(NamedTuple):
    """bias: fp32 [items, heads, 1 or rows per item, tokens], with the mask.

    lost: fp32 [rows, heads], the part of each row's true bias that it lacks; None: nothing.
    """

    bias: Tensor
    lost: Tensor | None


def causal_pieces(call: CausalCall, slopes: Tensor | None) -> Iterator[CausalCall]:
    """Divides a call with slopes into pieces of its rows, each with a bias for each head. slopes: fp32 [heads]."""
    if slopes is None:
        yield call
        return
    assert call.bias is not None, "planned for slopes"
    assert call.first_key is not None, "planned for slopes"
    first, begin, stop = call.first, call.first_key, call.first + call.length
    step = max(1, MASK_ELEMENTS // (slopes.shape[0] * (stop - begin)))
    for lo in range(first, stop, step):
        hi = min(lo + step, stop)
        mask = call.bias[:, :, lo - first : hi - first, : hi - begin]
        far = torch.arange(lo, hi)[:, None] - torch.arange(begin, hi)
        yield CausalCall(lo, 1, hi - lo, mask - slopes[:, None, None] * far, begin)


def head_bias(call: BlockCall, slopes: Tensor, positions: Tensor) -> HeadBias:
    """Computes the bias of each head. slopes: fp32 [heads]; positions: fp32 [rows] of the step."""
    places, of_head = call.places, slopes[:, None, None]
    assert places is not None, "planned for slopes"
    rows = positions[call.rows].view(call.items, call.rows_per_item)
    if places.shape[1] == call.rows_per_item and call.bias is not None:
        far = rows[..., None] - places
        return HeadBias(call.bias - of_head * far[:, None], None)
    seen = places if call.bias is None else places.masked_fill(call.bias[:, 0] < 0, 0)
    last = seen.amax((1, 2))
    bias = of_head * (places - last[:, None, None])[:, None]
    lost = (rows - last[:, None]).flatten()[:, None] * slopes
    return HeadBias(bias if call.bias is None else bias + call.bias, lost)
