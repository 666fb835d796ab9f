"""The likeliest token of each row of logits."""

from torch import Tensor


def likeliest_tokens(logits: Tensor) -> Tensor:
    """int64 [rows] of logits [rows, vocabulary]."""
    return within(logits.argmax(dim=-1), logits)


def within(tokens: Tensor, logits: Tensor) -> Tensor:
    """Keeps tokens of pad rows of NaN valid indices. CUDA's already are: it returns the place of the first NaN."""
    return tokens if tokens.is_cuda else tokens.clamp(0, logits.shape[1] - 1)
