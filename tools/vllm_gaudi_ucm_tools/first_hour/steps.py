"""Steps for attention: requests laid out by the plugin's own planner, padded to a bucket; and the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors, cut_copies, cut_views
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm_tools.first_hour.bench import Bench

CAUSAL_SLICE = 512
PADS = 3  # rows and blocks beyond the step, as a bucket has
EPSILONS = 4  # as in the tests of the operation

Region = Callable[..., Tensor]


@dataclass(frozen=True)
class Heads:
    """The heads of a layer."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 128

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass(frozen=True)
class Step:
    """A step on the host. computed and scheduled tokens of each request, by their block tables.

    query: [rows, heads, dim]; caches: [blocks, block_size, kv_heads, dim], with the new tokens in them.
    """

    plan: UnifiedPlan
    computed: np.ndarray
    scheduled: np.ndarray
    tables: np.ndarray
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    heads: Heads

    @property
    def limits(self) -> Limits:
        rows = self.plan.num_rows + PADS
        longest = int((self.computed + self.scheduled).max()) + PADS * self.heads.block_size
        return Limits(
            rows, len(self.computed) + PADS, longest, self.heads.block_size, len(self.key_cache), contiguous=False
        )

    @property
    def shape(self) -> ForwardShape:
        """Returns the shape of a bucket that is a little larger than the step."""
        unique = 0 if self.plan.unique is None else len(self.plan.unique.blocks)
        exact = true_shape(self.plan, unique).forward
        sizes = (size + PADS if size else 0 for size in (exact.shared_blocks, exact.unique_blocks))
        return ForwardShape.from_sizes("c" in exact.phase, exact.query_len + PADS, *sizes)


def make_step(requests: list[tuple[int, int]], shared_blocks: int, heads: Heads, dtype: torch.dtype) -> Step:
    """requests: (computed, scheduled) tokens of each. The first `shared_blocks` blocks belong to all of them."""
    computed, scheduled = np.array(requests, np.int32).T
    ends = computed + scheduled
    tables = np.zeros((len(ends), -(-int(ends.max()) // heads.block_size)), np.int32)
    free = 1 + shared_blocks
    for table, end in zip(tables, ends, strict=True):
        own = max(0, -(-int(end) // heads.block_size) - shared_blocks)
        table[:shared_blocks] = 1 + np.arange(shared_blocks)
        table[shared_blocks : shared_blocks + own] = free + np.arange(own)
        free += own
    plan = plan_batch(BatchInput(computed, scheduled, ends, (tables,)), heads.block_size)
    random = torch.Generator().manual_seed(len(requests))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, heads.dim, generator=random).to(dtype)

    caches = [randn(free + PADS, heads.block_size, heads.kv_heads) for _ in range(2)]
    query = randn(plan.num_rows, heads.heads)
    return Step(plan, computed, scheduled, tables, query, caches[0], caches[1], heads)


def bucket_region(heads: Heads, implementation: str, write: bool = False) -> Region:
    """Attention of one layer in a bucket, of (slots, parts, query, key, value, key rows, value rows).

    The rows [slots, kv_heads, dim] are base tensors, as the model's caches are. write: the new keys and values go to
    their slots first, in the same region, as in the model.
    """
    attention, spec = ATTENTION.make(implementation), AttentionSpec(heads.scale)

    def attend(
        slots: Tensor,
        parts: AttentionParts,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: Tensor,
        value_rows: Tensor,
    ) -> Tensor:
        if write:
            key_rows, value_rows = write_kv(key, value, key_rows, value_rows, slots)
        key_cache, value_cache = (rows.unflatten(0, (-1, heads.block_size)) for rows in (key_rows, value_rows))
        out = torch.empty_like(query)
        plan = attention.plan(parts, heads.block_size)
        attention.attend(query, key, value, key_cache, value_cache, plan, spec, out)
        return out

    return attend


def bucket_tensors(limits: Limits, bench: Bench) -> BucketTensors:
    """The staging of a server with these limits, which cuts its tensors as the mode needs it."""
    cut = bench.region(cut_copies) if bench.mode == "compile" else cut_views
    return BucketTensors(limits, CAUSAL_SLICE, bench.torch_device, cut=cut)


def bucket_inputs(tensors: BucketTensors, flat: Tensor, shape: ForwardShape) -> tuple[Tensor, AttentionParts]:
    """Slots and parts of a bucket, each tensor on its own: made before the layer's region, as in a server."""
    inputs = tensors.split(flat, shape)
    return inputs.slots, inputs.parts


def new_tokens(step: Step) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the step's rows [rows, kv_heads, dim], which the caches hold at their slots."""
    slots = torch.from_numpy(np.asarray(step.plan.slots, np.int64))
    keys, values = (cache.flatten(0, 1)[slots] for cache in (step.key_cache, step.value_cache))
    return keys, values


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Pads a tensor with rows of zeros at its end."""
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def seen_by(step: Step) -> list[tuple[Tensor, Tensor]]:
    """The keys and values [tokens, kv_heads, dim] that each row must see: its request's tokens up to the row."""
    found: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * step.plan.num_rows
    for place, request in enumerate(step.plan.requests):
        first = int(step.plan.query_start[place])
        computed, scheduled = int(step.computed[request]), int(step.scheduled[request])
        positions = np.arange(computed + scheduled)
        blocks = torch.from_numpy(step.tables[request][positions // step.heads.block_size].astype(np.int64))
        offsets = torch.from_numpy(positions % step.heads.block_size)
        keys, values = step.key_cache[blocks, offsets], step.value_cache[blocks, offsets]
        for row in range(scheduled):
            end = computed + row + 1
            found[first + row] = keys[:end], values[:end]
    return found


def oracle(step: Step) -> tuple[Tensor, float]:
    """Returns float64 [rows, heads, dim], and the error that a correct computation in the step's dtype may have.

    The error is twice the error of a plain softmax in this dtype, plus an epsilon band.
    """
    exact, plain, largest = [], [], 1.0
    groups = step.heads.heads // step.heads.kv_heads
    for row, (keys, values) in enumerate(seen_by(step)):
        keys, values = (one.repeat_interleave(groups, 1).transpose(0, 1) for one in (keys, values))
        query = step.query[row][:, None]
        exact.append(_attend(query.double(), keys.double(), values.double(), step.heads.scale))
        plain.append(_attend(query, keys, values, step.heads.scale).double())
        largest = max(largest, float(values.abs().max()))
    expected = torch.stack(exact)
    error = float((torch.stack(plain) - expected).abs().max())
    return expected, 2 * (error + EPSILONS * torch.finfo(step.query.dtype).eps * largest)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    scores = (query * keys).sum(-1) * scale
    return (torch.softmax(scores, -1)[..., None] * values).sum(1)
