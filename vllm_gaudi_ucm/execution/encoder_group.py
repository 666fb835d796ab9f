"""The group of an encoder's layers: they keep nothing of a request, and have no blocks."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import GroupPlan, PlanOfGroup, UnifiedPlan
from vllm_gaudi_ucm.batch.encoder_plan import EncoderPlanner
from vllm_gaudi_ucm.execution.attention_group import NO_GROUP, AttentionGroup, AttentionInputs
from vllm_gaudi_ucm.execution.step_sizes import Sizes, of_causal_rows, of_rows
from vllm_gaudi_ucm.execution.step_tensors import StepTensor
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice
from vllm_gaudi_ucm.vllm_api.kv_cache import EncoderOnlyAttentionSpec
from vllm_gaudi_ucm.vllm_api.model import EncoderOnlyAttention

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.execution.cache_group import Tensors, ToDevice
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits


class EncoderGroup(AttentionGroup):
    """All layers of an encoder, the only group of an engine; see CacheGroup.

    It is an attention group with the causal part alone, whose rows see both ways. So planning, buckets and the record
    of a step are the same as for a prompt without context. No layer writes to slots, which only tell rows from pads.
    """

    spec = EncoderOnlyAttentionSpec
    layer_classes = (EncoderOnlyAttention,)

    def planner(self, causal_slice: int, batches: int) -> EncoderPlanner:  # type: ignore[override]
        return EncoderPlanner(causal_slice)

    def tensors(self, number: int) -> tuple[StepTensor, ...]:
        assert not number, "an encoder has no other groups"
        return _TENSORS

    def at_true_shape(
        self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice
    ) -> AttentionInputs:
        causal = cast(GroupPlan, own).causal
        assert causal is not None, "a step has rows"
        return _inputs(tensors, tuple(CausalSlice(*bounds) for bounds in causal.slices))

    def in_buckets(  # type: ignore[override]
        self, number: int, limits: Limits, causal_slice: int, device: torch.device
    ) -> _InBuckets:
        return _InBuckets(limits.max_model_len, causal_slice)


class _InBuckets(NamedTuple):
    """Makes the inputs of the group in buckets; see GroupInBuckets. longest: rows of the longest request."""

    longest: int
    causal_slice: int

    def make_inputs(self, shape: ForwardShape, tensors: Tensors) -> AttentionInputs:
        """Returns the inputs. Which rows a request has is data, so a slice sees all rows that may belong to it."""
        rows, more = shape.query_len, self.longest - 1
        slices = []
        for lo in range(0, rows, self.causal_slice):
            hi = min(lo + self.causal_slice, rows)
            slices.append(CausalSlice(lo, hi, max(0, lo - more), min(rows, hi + more)))
        return _inputs(tensors, tuple(slices))

    def refill(self) -> None:
        """Has no tensors of its own."""


def _inputs(tensors: Tensors, slices: tuple[CausalSlice, ...]) -> AttentionInputs:
    causal = CausalPart(tensors["groups"], slices, starts=tensors["request_starts"])
    return AttentionInputs(tensors["slots"], AttentionParts(causal))


def _of_starts(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.limits.max_num_seqs + 1,)


_TENSORS = (
    StepTensor("slots", attrgetter("plan.slots"), of_rows, DUMMY_BLOCK),
    StepTensor("groups", attrgetter("plan.causal.groups"), of_causal_rows, NO_GROUP, ("causal",), np.int32),
    # the pads of a step are one more request, which no row belongs to
    StepTensor(
        "request_starts", attrgetter("plan.query_start"), _of_starts, lambda sizes: sizes.shape.query_len, ("causal",)
    ),
)
