"""`FusedSDPA` and `apply_rotary_pos_emb`: what callers of the bridge use in place of its operators."""

import enum
from typing import Any

from habana_frameworks.torch.hpu.sdp import recompute_sdp_enabled
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import duties

import torch
from torch import Tensor

ARGUMENTS = 28
_SOFTMAX_MODES = ("none", "fast", "fp32")


class FusedSDPA(torch.autograd.Function):
    """Called as `FusedSDPA.apply(...)`; there is no gradient here."""

    @staticmethod
    def forward(
        ctx: object,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: Tensor | None = None,
    ) -> Any:
        """Attention [batch, heads, rows, dim]; with its probabilities [batch, heads, rows, keys] if they are asked for.

        q: [batch, heads, rows, dim]; k, v: [batch, kv_heads, keys, dim]; attn_mask: [rows, keys], or 4-d, added to the
        scores. recompute_mode: False materialises the probabilities, unless there is one row alone. valid_seq_len: int
        [batch], true keys of each sequence, with is_causal only; the others are on the side `seq_padding_type`.
        Raises HpuConstraintError for arguments that do not go together.
        """
        mode, recompute = _check(q, softmax_mode, recompute_mode, return_dropout_mask, return_attn_probs)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        grouped = q.dim() == 4 and k.shape[1] not in (q.shape[1], 1)
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask.expand(q.shape[0], *[1] * (q.dim() - 3), *attn_mask.shape)
        if grouped:
            q, k, v, attn_mask = _in_groups(q, k, v, attn_mask)
        common = q, k, v, attn_mask, dropout_p, scale, is_causal
        padding = valid_seq_len, seq_padding_type.lower()
        if recompute:
            out, *_ = torch.ops.hpu.sdpa_recomp_fwd(*common, False, mode, *padding, list(window_size), sink)
            return out.flatten(1, 2) if grouped else out
        if tuple(window_size) != (-1, -1) or sink is not None:
            duties.refuse(ARGUMENTS, "FusedSDPA", "a window or sinks without recompute_mode", "set it to True")
        out, probabilities, _ = torch.ops.hpu.sdpa_fwd(*common, mode, *padding)
        if grouped:
            out, probabilities = out.flatten(1, 2), probabilities.flatten(1, 2)
        return (out, probabilities) if return_attn_probs else out


def _check(
    q: Tensor, softmax_mode: str, recompute: bool | None, return_dropout_mask: bool, return_attn_probs: bool
) -> tuple[str, bool]:
    """The softmax's mode as the operators take it, and whether probabilities are computed again."""
    mode = softmax_mode.lower()
    if mode not in _SOFTMAX_MODES:
        raise HpuConstraintError("FusedSDPA", f"softmax_mode {softmax_mode!r}", ARGUMENTS, f"one of {_SOFTMAX_MODES}")
    if mode == "fp32" and q.dtype != torch.bfloat16:
        duties.refuse(ARGUMENTS, "FusedSDPA", f"softmax_mode 'fp32' with {q.dtype}", "it is for bfloat16")
    if return_dropout_mask:
        duties.refuse(ARGUMENTS, "FusedSDPA", "return_dropout_mask", "this stand-in is for inference: False")
    if return_attn_probs:
        return mode, False
    return mode, q.shape[-2] == 1 or (recompute_sdp_enabled() if recompute is None else recompute)


def _in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """5-d: a group of query heads for each head of keys."""
    groups = k.shape[1]
    if mask is not None:
        mask = mask.unflatten(1, (groups, -1)) if mask.shape[1] == q.shape[1] else mask.unsqueeze(1)
    return q.unflatten(1, (groups, -1)), k.unsqueeze(2), v.unsqueeze(2), mask


class RotaryPosEmbeddingMode(enum.Enum):
    """Which numbers of a head are a plane: one of each half, or neighbours."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> Tensor:
    """Rotated p, cos before sin. A float32 among the three makes the result float32, else it has p's dtype.

    p: [tokens, heads, width]; cos, sin: as wide as p, see `rotary_pos_embedding`.
    """
    dtype = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)
