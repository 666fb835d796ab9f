"""A step of new tokens alone through Gaudi's FusedSDPA, which keeps all scores on the chip.

It returns no log-sum-exp, so its result cannot be merged: where rows see anything in the cache, `hpu_causal` computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart


def fused_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: CausalPart,
    scale: float,
    out: Tensor,
    kernel: Callable[..., Tensor],
) -> None:
    """Writes the rows of all slices; `out` of the others must be zeros. kernel: `FusedSDPA.apply`.

    What a row does not see is masked by adding the lowest number, so it must be finite, and a row that sees nothing
    gets a mean of everything: both are put right here.
    """
    broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    key, value = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (key, value))
    position = torch.arange(query.shape[0], device=query.device)
    groups = key.shape[1], query.shape[1] // key.shape[1]
    for query_lo, query_hi, key_lo, key_hi in part.slices:
        rows, keys = slice(query_lo, query_hi), slice(key_lo, min(key_hi, query_hi))
        own = part.groups[rows, None]
        visible = (own == part.groups[None, keys]) & (own >= 0) & (position[None, keys] <= position[rows, None])
        bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill(~visible, torch.finfo(query.dtype).min)
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query[rows], key[keys], value[keys]))
        found = kernel(*heads_first, bias[None, None], 0.0, False, scale, "None", False)[0].transpose(0, 1)
        tainted = visible.to(query.dtype) @ broken[keys].to(query.dtype) > 0
        found = found.unflatten(1, groups).masked_fill(tainted[..., None, None], float("nan")).flatten(1, 2)
        out[rows] = found.masked_fill(~visible.any(-1)[:, None, None], 0)
