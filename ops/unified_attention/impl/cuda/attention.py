"""Unified Attention on CUDA: the implementation by Triton kernels. They are imported on first use, because triton is
optional.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.selected_list import SelectedList
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import CudaPlan


class CudaAttention(AttentionImplementation):
    """Unified Attention by Triton kernels on a GPU; if chosen by name, also on a CPU under Triton's interpreter."""

    devices = frozenset({"cuda"})
    priority = 20
    traceable = False
    gives_log_sums = True

    def supports(self, spec: AttentionSpec) -> bool:
        return not spec.both_ways

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def plan(self, parts: AttentionParts, block_size: int) -> CudaPlan:
        """Sorts the entries of the step on the device."""
        from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import make_plan

        return make_plan(parts, block_size)

    def selected_list(self, plan: CudaPlan, rows: int) -> SelectedList | None:
        """The list of single rows, if all choices are for them, or the list of requests with their own blocks."""
        from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.joined import joined_lists
        from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.own import own_and_chosen

        if plan.joined_own:
            return own_and_chosen(plan).joined.chosen
        return joined_lists(plan, rows).chosen if plan.joined else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: CudaPlan,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Returns False, and logs it once, if the kernels do not cover the layer."""
        tensors = (query, key, value, key_cache, value_cache)
        return self._attend(*tensors, plan, spec, out, selected_blocks, per_head, log_sums)

    @cached_property
    def _attend(self) -> Callable[..., bool]:
        from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.attend import attend

        return attend
