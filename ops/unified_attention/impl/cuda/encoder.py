"""Attention of encoders by torch's kernel for sequences of several lengths, which may be captured in a graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead


class Sequences(NamedTuple):
    """The requests of a step. starts: int32 [requests + 1]. most: no request has more rows. pads: bool [rows, 1, 1]."""

    starts: Tensor
    most: int
    pads: Tensor


class CudaEncoder(AttentionImplementation):
    """Attention of encoders in half precision. Other dtypes go to the reference."""

    devices = frozenset({"cuda"})
    priority = 10  # lower than implementations for decoders, which refuse encoders
    traceable = False

    def supports(self, spec: AttentionSpec) -> bool:
        return spec.is_plain_encoder

    def unavailable(self, device: str) -> str | None:
        if (found := super().unavailable(device)) is not None:
            return found
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except ImportError:
            return "torch has no attention of sequences of several lengths"
        return None

    def plan(self, parts: AttentionParts, block_size: int) -> Sequences | None:
        """Reads nothing on the host."""
        part = parts.causal
        if part is None or part.starts is None:
            return None
        most = max((one.key_hi - one.key_lo for one in part.slices), default=0)
        return Sequences(part.starts.to(torch.int32), most, (part.groups < 0)[:, None, None])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Sequences | None,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface. False for float32, which the kernel does not know, and if sums are requested."""
        if plan is None or log_sums is not None or query.dtype not in (torch.float16, torch.bfloat16):
            return False
        from torch.nn.attention.varlen import varlen_attn

        side = -1 if spec.reach is None else spec.reach - 1
        found = varlen_attn(
            query.contiguous(),
            _of_each_head(key, query.shape[1]),
            _of_each_head(value, query.shape[1]),
            plan.starts,
            plan.starts,
            plan.most,
            plan.most,
            scale=spec.scale,
            window_size=(side, side),
        )
        assert isinstance(found, Tensor), "no sums were requested"
        # the kernel leaves rows of no request as they were
        torch.where(plan.pads, torch.zeros_like(found), found, out=out)
        return True


def _of_each_head(rows: Tensor, heads: int) -> Tensor:
    """Returns keys or values [rows, heads, size], a copy if query heads share them: the kernel of torch 2.11 knows no
    groups of heads.
    """
    return rows.contiguous() if rows.shape[1] == heads else rows.repeat_interleave(heads // rows.shape[1], dim=1)
