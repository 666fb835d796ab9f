"""Unified Attention on a CPU in torch: a few calls of its CPU flash kernel per layer, planned once per step.

Partial results are merged as (normalised out, log-sum-exp), the form that the kernel returns.

The kernel multiplies masked tokens too, so garbage in an unused token makes a NaN; it never makes a *finite wrong*
number (tests/ops/test_garbage.py). So `attend` checks its result once, and returns False if it is not finite; the
caller then uses the reference, which is exact. This misses one case: a key with a score of -Inf has weight 0 here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.plan import BlockCall, CausalCall, CpuPlan, RowIndex, make_plan
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.slopes import HeadBias, causal_pieces, head_bias
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import NOTHING_SEEN, AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Up to this many rows, the query heads of one kv head are multiplied together; measured by benchmarks/attention_cpu.py.
FOLD_ROWS = 16


class CpuAttention(AttentionImplementation):
    """Unified Attention by torch's flash kernel, on a CPU."""

    devices = frozenset({"cpu"})
    priority = 10
    capturable = False
    gives_log_sums = True
    traceable = False

    def supports(self, spec: AttentionSpec) -> bool:
        """The kernel does not return scores before its softmax, so a soft cap is not supported."""
        return spec.logits_soft_cap is None and not spec.both_ways

    def plan(self, parts: AttentionParts, block_size: int) -> CpuPlan:
        return make_plan(parts, block_size)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: CpuPlan,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface; also False for a selected part: its blocks differ by layer, but the calls are formed once
        per step.
        """
        if plan.selected:
            return False
        if spec.values_in_keys and value.shape[-1] < key.shape[-1]:
            # the kernel knows one head size: whole keys serve as values, and only the first elements of the result are
            # used
            wide = torch.empty_like(query)
            keys, whole = (key, key, key_cache, key_cache), replace(spec, values_in_keys=False)
            done = self.attend(query, *keys, plan, whole, wide, per_head=per_head, log_sums=log_sums)
            out.copy_(wide[..., : value.shape[-1]])
            return done
        if value.shape[-1] != query.shape[-1] or any(
            tensor.stride(-1) != 1 for tensor in (query, key, value, key_cache, value_cache)
        ):
            return False  # the kernel knows one head size, and no stride inside a head
        rows, heads, _ = query.shape
        result = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
        lse = None
        if plan.merges or spec.has_sinks or log_sums is not None:
            lse = query.new_full((rows, heads), -math.inf, dtype=torch.float32)
        if plan.fresh_rows < rows:
            result.zero_()
        query = query.float()
        if plan.causal:
            key, value = key.float(), value.float()
        slopes, positions = per_head.slopes, plan.positions
        for call in plan.causal:
            for piece in causal_pieces(call, slopes):
                _run_causal(query, key, value, piece, spec.scale, result, lse)
        for cached in plan.cached:
            by_head = None if slopes is None or positions is None else head_bias(cached, slopes, positions)
            _run_cached(query, key_cache, value_cache, cached, spec.scale, result, lse, plan.scratch, by_head)
        if per_head.sinks is not None and lse is not None:
            # the share of its tokens in a row's sum
            result *= torch.sigmoid(lse - per_head.sinks)[..., None]
        if not math.isfinite(result.sum().item()):
            return False
        if result is not out:
            out.copy_(result)
        if log_sums is not None and lse is not None:
            log_sums.copy_(lse.clamp(min=NOTHING_SEEN))
        return True


def _run_causal(
    query: Tensor, key: Tensor, value: Tensor, call: CausalCall, scale: float, result: Tensor, lse: Tensor | None
) -> None:
    rows = slice(call.first, call.first + call.squares * call.length)
    keys = rows if call.first_key is None else slice(call.first_key, rows.stop)
    q, k, v = (
        tensor.unflatten(0, (call.squares, -1)).transpose(1, 2) for tensor in (query[rows], key[keys], value[keys])
    )
    out, out_lse = _flash(q, k, v, is_causal=call.bias is None, attn_mask=call.bias, scale=scale)
    result[rows] = out.transpose(1, 2).flatten(0, 1)
    if lse is not None:
        lse[rows] = out_lse.transpose(1, 2).flatten(0, 1)


def _run_cached(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    call: BlockCall,
    scale: float,
    result: Tensor,
    lse: Tensor | None,
    scratch: dict[str, Tensor],
    by_head: HeadBias | None,
) -> None:
    k, v = _read(key_cache, value_cache, call, scratch)
    items, rows, (heads, dim), kv_heads = call.items, call.rows_per_item, query.shape[1:], key_cache.shape[2]
    q = query[call.rows]
    mask = call.bias if by_head is None else by_head.bias
    if rows <= FOLD_ROWS and (mask is None or mask.shape[2] == 1):
        # One multiplication per kv head instead of one per query head: the keys are read once.
        q = q.view(items, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4)
        if by_head is not None and mask is not None:
            mask = mask.view(items, kv_heads, 1, -1, call.tokens).expand(-1, -1, rows, -1, -1).flatten(2, 3)
        out, out_lse = _flash(q.reshape(items, kv_heads, -1, dim), k, v, attn_mask=mask, scale=scale)
        folded = (items, kv_heads, rows, heads // kv_heads)
        out = out.view(*folded, dim).permute(0, 2, 1, 3, 4).reshape(-1, heads, dim)
        out_lse = out_lse.view(folded).permute(0, 2, 1, 3).reshape(-1, heads)
    else:
        q = q.view(items, rows, heads, dim).transpose(1, 2)
        out, out_lse = _flash(q, k, v, attn_mask=mask, scale=scale)
        out, out_lse = out.transpose(1, 2).flatten(0, 1), out_lse.transpose(1, 2).flatten(0, 1)
    if by_head is not None and by_head.lost is not None:
        out_lse = out_lse - by_head.lost
    if call.fresh:
        result[call.rows] = out
        if lse is not None:
            lse[call.rows] = out_lse
    else:
        assert lse is not None
        _merge(result, lse, call.rows, out, out_lse)


def _merge(result: Tensor, lse: Tensor, rows: RowIndex, out: Tensor, out_lse: Tensor) -> None:
    before = lse[rows]
    after = torch.logaddexp(before, out_lse)
    kept = result[rows] * torch.exp(before - after)[..., None]
    result[rows] = kept.addcmul_(out, torch.exp(out_lse - after)[..., None])
    lse[rows] = after


def _read(key_cache: Tensor, value_cache: Tensor, call: BlockCall, scratch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """fp32 keys and values [items, kv_heads, tokens, dim]: views of the cache or of a gathered copy."""
    return _read_tokens(key_cache, call, "key", scratch), _read_tokens(value_cache, call, "value", scratch)


def _read_tokens(cache: Tensor, call: BlockCall, name: str, scratch: dict[str, Tensor]) -> Tensor:
    """fp32 [items, kv_heads, tokens, dim] of one cache."""
    if isinstance(call.blocks, slice):
        blocks = cache[call.blocks]
    else:
        count = call.blocks.shape[0]
        # if a context is shorter than a block, the rest of the block need not be copied
        cache = cache[:, : call.tokens] if count == call.items else cache
        shape = cache.shape[1:]
        room = scratch.get(name)
        if room is None or room.shape[0] < count or room.shape[1:] != shape or room.dtype != cache.dtype:
            room = scratch[name] = cache.new_empty((count, *shape))
        blocks = torch.index_select(cache, 0, call.blocks, out=room[:count])
    tokens = blocks.flatten(0, 1).unflatten(0, (call.items, -1))
    return tokens[:, : call.tokens].float().transpose(1, 2)
