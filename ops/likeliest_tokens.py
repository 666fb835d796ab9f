"""The likeliest token of each row of logits."""

from __future__ import annotations

from torch import Tensor


def likeliest_tokens(logits: Tensor) -> Tensor:
    """int64 [rows] of logits [rows, vocabulary]."""
    return within(logits.argmax(dim=-1), logits)


def within(tokens: Tensor, logits: Tensor) -> Tensor:
    """What a device answers for a pad row of NaN must still be an index. CUDA answers the place of the first."""
    return tokens if tokens.is_cuda else tokens.clamp(0, logits.shape[1] - 1)
