"""Chooses the experts of each row and their weights: the best by a score of the router's logits.

On CUDA this is one launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.moe.spec import TINY
from vllm_gaudi_ucm.ops.registry import why_not_triton

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
    """Chooses the best experts of each row by score plus bias, in descending order; weights come from the score alone.

    logits: [rows, experts]. score: a key of `SCORES`. renormalise: weights of a row add up to one, before `scale`.
    bias: [experts]. dtype: of the ids.

    Returns float32 weights and ids, both [rows, chosen].
    """
    if not torch.compiler.is_compiling() and why_not_triton(logits.device.type) is None:
        from vllm_gaudi_ucm.ops.moe.impl.cuda.choice import can_choose, cuda_choose

        if can_choose(logits, bias):
            return cuda_choose(logits, chosen, score, renormalise, bias, scale, dtype)
    scores = SCORES[score](logits.float())
    if bias is None:
        weights, ids = scores.topk(chosen, -1)
    else:
        ids = (scores + bias.float()).topk(chosen, -1).indices
        weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights if scale == 1.0 else weights * scale, ids.to(dtype)
