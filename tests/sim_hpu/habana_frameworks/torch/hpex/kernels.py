"""`FusedSDPA`: fused attention for prompts, computed by torch's reference formula."""

from habana_frameworks.torch.simulator.constraint import HpuConstraintError

import torch
from torch import Tensor


class FusedSDPA(torch.autograd.Function):
    """Called as `FusedSDPA.apply(...)`; there is no gradient here."""

    @staticmethod
    def forward(
        ctx: object,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = False,
        valid_len: Tensor | None = None,
        pad_side: str = "left",
    ) -> Tensor:
        """Attention without its log-sum-exp.

        q: [batch, heads, rows, dim]; k, v: [batch, kv_heads, keys, dim]; mask: added to the scores.
        softmax_mode: "None" or "fast"; recompute: speed alone. valid_len: int [batch], true keys of each sequence, with
        is_causal only; the others are on pad_side, and rows of pads are zeros.
        """
        _check(mask, dropout, is_causal, softmax_mode, valid_len, pad_side)
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores + mask
        seen = _seen(q, k, is_causal, valid_len, pad_side)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        return torch.matmul(weights.to(v.dtype), v)


def _check(
    mask: Tensor | None, dropout: float, is_causal: bool, softmax_mode: str, valid_len: Tensor | None, pad_side: str
) -> None:
    if mask is not None and is_causal:
        raise HpuConstraintError("FusedSDPA", "a mask together with is_causal, expected one of them")
    if valid_len is not None and not is_causal:
        raise HpuConstraintError("FusedSDPA", "valid_len without is_causal")
    if dropout != 0.0:
        raise HpuConstraintError("FusedSDPA", f"dropout {dropout}: this stand-in is for inference, expected 0")
    if softmax_mode not in ("None", "fast") or pad_side not in ("left", "right"):
        raise HpuConstraintError(
            "FusedSDPA", f"softmax_mode {softmax_mode!r}, pad_side {pad_side!r}; expected None or fast, left or right"
        )


def _seen(q: Tensor, k: Tensor, is_causal: bool, valid_len: Tensor | None, pad_side: str) -> Tensor:
    """bool [batch or 1, 1, rows, keys]: which keys a row sees."""
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    seen = (key <= row)[None] if is_causal else torch.ones_like(key <= row)[None]
    if valid_len is not None:
        length = valid_len[:, None]
        true_key = key < length if pad_side == "right" else key >= k.shape[2] - length
        seen = seen & true_key[:, None, :] & true_key[:, : q.shape[2], None]
    return seen[:, None]
