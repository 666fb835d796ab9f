"""Mixture of experts by torch's grouped product: rows sorted by expert on the device, two products for all experts."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.gate import gate
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import PLAIN, MoeSpec


class GroupedMoe(MoeImplementation):
    """Mixture of experts by torch's own kernels; without biases, which the grouped product does not add. If chosen by
    name, it also runs on a CPU.
    """

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 10

    def unavailable(self, device: str) -> str | None:
        if device not in ("cpu", "cuda"):
            return f"it is for cuda, got tensors on {device}"
        return None if "_grouped_mm" in vars(torch) else f"torch {torch.__version__} has no grouped product"

    def supports(self, spec: MoeSpec) -> bool:
        return spec.weights == PLAIN and not spec.bias

    def compute(self, x: Tensor, ids: Tensor, shares: Tensor, form: ExpertWeights, spec: MoeSpec) -> Tensor:
        rows, chosen = ids.shape
        experts = form.w13.shape[0]
        here = (ids >= 0) & (ids < experts)
        numbers, pairs = ids.masked_fill(~here, experts).flatten().sort(stable=True)
        # torch.bincount would wait for the device
        ends = torch.searchsorted(numbers, torch.arange(experts, device=x.device, dtype=numbers.dtype), right=True)
        ends = ends.to(torch.int32)
        given = x.index_select(0, pairs // chosen)
        inner = gate(torch._grouped_mm(given, form.w13.transpose(1, 2), offs=ends), spec)
        found = torch._grouped_mm(inner, form.w2.transpose(1, 2), offs=ends)
        # rows past the last expert's are not written
        placed = torch.empty_like(found).index_copy_(0, pairs, found).view(rows, chosen, -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        each = placed.to(wide) * shares.to(wide).unsqueeze(-1)
        return each.masked_fill(~here.unsqueeze(-1), 0).sum(1).to(x.dtype)
