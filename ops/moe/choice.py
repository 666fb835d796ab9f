"""Which experts a row takes, and with which weights: the best by a score of the router's logits.

On CUDA one launch; the kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.registry import why_not_triton

# vLLM's own kernels keep a sum of sigmoids from zero so
TINY = 1e-20
# Experts whose scores a program keeps in registers.
LARGEST = 2048

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: functional.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
}


def choose_experts(
    logits: Tensor,
    chosen: int,
    score: str,
    renormalise: bool,
    bias: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """The best of each row by score and bias, in descending order, weighted by score alone.

    logits: [rows, experts]. score: a key of `SCORES`. renormalise: weights of a row add up to one, before `scale`.
    bias: [experts]. dtype: of the ids.

    Returns float32 weights and ids, both [rows, chosen].
    """
    if _is_covered(logits, bias):
        return _by_kernel(logits, chosen, score, renormalise, bias, scale, dtype)
    scores = SCORES[score](logits.float())
    if bias is None:
        weights, ids = scores.topk(chosen, -1)
    else:
        ids = (scores + bias.float()).topk(chosen, -1).indices
        weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights if scale == 1.0 else weights * scale, ids.to(dtype)


def _is_covered(logits: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    fits = logits.dim() == 2 and 0 < logits.shape[1] <= LARGEST and logits.stride(1) == 1
    return fits and (bias is None or bias.is_contiguous()) and why_not_triton(logits.device.type) is None


def _by_kernel(
    logits: Tensor,
    chosen: int,
    score: str,
    renormalise: bool,
    bias: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from vllm_gaudi_ucm.ops.moe.impl.cuda.triton.choice import choose

    rows, experts = logits.shape
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chosen, dtype=dtype, device=logits.device)
    if rows:
        choose[(rows,)](
            *(logits, bias, weights, ids, logits.stride(0), scale),
            EXPERTS=experts,
            SPREAD=1 << (experts - 1).bit_length(),
            CHOSEN=chosen,
            SIGMOID=score == "sigmoid",
            RENORMALISE=renormalise,
            TINY=TINY,
            num_warps=1 if experts <= 512 else 4,
        )
    return weights, ids
