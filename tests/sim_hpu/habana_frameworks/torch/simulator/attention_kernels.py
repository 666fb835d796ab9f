"""Fused attention: `sdpa_recomp_fwd`, which keeps no probabilities, and `sdpa_fwd`, which returns them."""

from collections.abc import Sequence
from typing import NamedTuple

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel, same_dtype

import torch
from torch import Tensor

STATISTICS, ARGUMENTS = 27, 28
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, {backward}"
    "str softmax_mode, Tensor? valid_seq_len, str seq_padding_type"
)
_FLOATS = (torch.bfloat16, torch.float32)
_SEED = 0


class _Weights(NamedTuple):
    """exponentials: f32 [..., rows, keys], not normalised. top, total: f32 [..., rows, 1], of the unrounded scores."""

    exponentials: Tensor
    top: Tensor
    total: Tensor


def sdpa_recomp_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
    window_size: Sequence[int] = (-1, -1),
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, m, linv, seed): attention, normalised, with the statistics of its softmax.

    q: bf16 or f32 [batch, heads, rows, dim], or 5-d with groups of heads: [batch, kv_heads, heads of each, rows, dim];
        k, v likewise with one head (or one of each group). attention_mask: added to the scores, or bool.
    valid_seq_len: int [batch], keys of each sequence, the others being on the side `seq_padding_type`.
    window_size: keys before and after a row's own that it sees, -1 for all. sink: [heads], one more score of each row.

    m: [..., rows, 1] in q's dtype: the largest score, rounded. linv: 1 / sum of exp(score - largest), where the largest
    is not rounded; bf16 for bf16 in mode "fast", else f32. Both are of use with `requires_backward` alone.
    Source: the bridge's own registration of the operator; whether m is rounded before the sum is known to nobody.
    """
    _check("hpu.sdpa_recomp_fwd", q, k, v, attention_mask, p, is_causal, valid_seq_len, seq_padding_type)
    weights = _weights(q, k, attention_mask, scale, is_causal, valid_seq_len, seq_padding_type, window_size, sink)
    out = _average(weights, v, q.dtype)
    kept = torch.bfloat16 if softmax_mode == "fast" and q.dtype == torch.bfloat16 else torch.float32
    seed = torch.full((1,), _SEED, dtype=torch.int32, device=q.device)
    if not requires_backward:
        nothing = q.new_full((1,), float("nan"))
        return out, nothing, nothing.to(kept), seed
    return out, weights.top.to(q.dtype), weights.total.reciprocal().to(kept), seed


def sdpa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    softmax_mode: str,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, probabilities, dropout mask); the probabilities [..., rows, keys] take the memory to be saved."""
    _check("hpu.sdpa_fwd", q, k, v, attention_mask, p, is_causal, valid_seq_len, seq_padding_type)
    weights = _weights(q, k, attention_mask, scale, is_causal, valid_seq_len, seq_padding_type, (-1, -1), None)
    probabilities = (weights.exponentials / weights.total).to(q.dtype)
    return _average(weights, v, q.dtype), probabilities, q.new_zeros((1,), dtype=torch.int8)


def _check(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    valid_seq_len: Tensor | None,
    padding: str,
) -> None:
    if q.dtype not in _FLOATS:
        duties.refuse(STATISTICS, name, f"q is {q.dtype}", "use bfloat16 or float32")
    same_dtype(STATISTICS, name, q, k=k, v=v)
    if p != 0.0:
        duties.refuse(ARGUMENTS, name, f"dropout {p}", "this stand-in is for inference: 0")
    if mask is not None and is_causal:
        duties.refuse(ARGUMENTS, name, "a mask together with is_causal", "put the triangle into the mask")
    if valid_seq_len is not None and not is_causal:
        duties.refuse(ARGUMENTS, name, "valid_len without is_causal", "give a mask")
    if valid_seq_len is not None and mask is not None:
        duties.refuse(ARGUMENTS, name, "valid_len together with a mask", "put the lengths into the mask")
    if padding not in ("left", "right"):
        duties.refuse(ARGUMENTS, name, f"padding on side {padding!r}", "'left' or 'right'")
    if q.dim() == 4 and k.shape[1] not in (1, q.shape[1]):
        found = f"{q.shape[1]} heads on {k.shape[1]} of keys in 4-d"
        duties.refuse(STATISTICS, name, found, "reshape to 5-d: [batch, kv_heads, heads of each, rows, dim]")


def _weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    valid_seq_len: Tensor | None,
    padding: str,
    window: Sequence[int],
    sink: Tensor | None,
) -> _Weights:
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.float()
    seen = _seen(q, k, is_causal, valid_seq_len, padding, window)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    scores = scores.masked_fill(~seen, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.float().reshape(*q.shape[1:-2], 1, 1)
        top = torch.maximum(top, sink)
    exponentials = torch.exp(scores - top)
    total = exponentials.sum(-1, keepdim=True)
    return _Weights(exponentials, top, total if sink is None else total + torch.exp(sink - top))


def _seen(
    q: Tensor, k: Tensor, is_causal: bool, valid_seq_len: Tensor | None, padding: str, window: Sequence[int]
) -> Tensor:
    """bool [batch or 1, 1..., rows, keys]: which keys a row sees."""
    row = torch.arange(q.shape[-2], device=q.device)[:, None]
    key = torch.arange(k.shape[-2], device=q.device)
    seen = key <= row if is_causal else torch.ones_like(key <= row)
    before, after = window
    if before >= 0:
        seen = seen & (key >= row - before)
    if after >= 0:
        seen = seen & (key <= row + after)
    if valid_seq_len is not None:
        length = valid_seq_len[:, None]
        true_key = key < length if padding == "right" else key >= k.shape[-2] - length
        seen = seen & true_key[:, None, :] & true_key[:, : q.shape[-2], None]
        return seen.reshape(len(valid_seq_len), *[1] * (q.dim() - 3), *seen.shape[-2:])
    return seen


def _average(weights: _Weights, v: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, weighted: exponentials are rounded to v's dtype, sums are f32."""
    # rows with NaN get it back from their total: the product of bfloat16 on a CPU's matrix unit spreads it to the
    # rows beside them, the card's does not
    exponentials = weights.exponentials.nan_to_num(nan=0.0).to(v.dtype)
    product = torch.matmul(exponentials, v).float()
    out = product / weights.total
    if card.masked_rows_are_zero:
        out = torch.where(weights.top == float("-inf"), torch.zeros_like(out), out)
    return out.to(dtype)


KERNELS = (
    Kernel(
        f"sdpa_recomp_fwd({_ARGUMENTS.format(backward='bool requires_backward, ')}, int[] window_size=[-1, -1], "
        "Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor)",
        sdpa_recomp_fwd,
    ),
    Kernel(f"sdpa_fwd({_ARGUMENTS.format(backward='')}) -> (Tensor, Tensor, Tensor)", sdpa_fwd),
)
