"""Rejection sampling of drafts that were drawn from a distribution of their own."""

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.rejection_sampling.impl.reference import accept_or_draw as reference


def accept_or_draw(
    probabilities: Tensor, drafts: Tensor, draft_probabilities: Tensor, uniform: Tensor, noise: Tensor
) -> Tensor:
    """Accepts the draft d of a row with probability min(1, p(d) / q(d)), and otherwise draws from max(p - q, 0).

    So the token of each row has distribution p, whatever q is. Nothing is read on the host, and all shapes depend only
    on the shapes of the arguments. If rounding leaves nothing of max(p - q, 0), a row draws from p, which is q then.
    On a GPU one launch gives the same tokens as the reference.

    Args:
        probabilities: p, [rows, vocabulary].
        drafts: int64 [rows]; -1 in rows without a draft, which draw from p.
        draft_probabilities: q, [rows, vocabulary], from which each draft was drawn. Rows without a draft may hold
            anything, and q(d) of NaN counts as no draft.
        uniform: [rows], random numbers between 0 and 1.
        noise: [rows, vocabulary], of an exponential distribution. Neither depends on the drafts.

    Returns:
        int64 [rows].
    """
    arguments = (probabilities, drafts, draft_probabilities, uniform, noise)
    if not torch.compiler.is_compiling() and why_not_triton(probabilities.device.type) is None:
        from vllm_gaudi_ucm.ops.rejection_sampling.impl.cuda.rejection import can_accept_or_draw, cuda_accept_or_draw

        if can_accept_or_draw(*arguments):
            return cuda_accept_or_draw(*arguments)
    return reference(*arguments)
