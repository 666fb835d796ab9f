"""One attention layer over many steps of requests with known queries, keys and values, and its oracle in float64.

A request's token at a position has the same q, k and v whenever it is computed, so that any step can be compared with
attention over the whole context, or over chosen blocks of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.attention_group import step_metadata
from vllm_gaudi_ucm.execution.bucketed_execution import is_remainder, remainder_shapes
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import StepInputs, true_shape
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.api import unified_attention
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.block_selector import BlockSelector, SelectionLayer
from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection, Scoring
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5
CPU = torch.device("cpu")


@dataclass
class Member:
    """A request of a step: tokens computed before it and computed in it, the last `drafts` of them uncertain."""

    request_id: str
    computed: int
    new: int
    drafts: int = 0
    decision: RequestSelection | None = None


@dataclass
class Seen:
    """What one request got in a step: output [new, heads, dim], and the logical blocks chosen for it."""

    output: torch.Tensor
    chosen: list[int] | None = None


@dataclass
class OneLayer:
    """A server of one layer. block_size, num_blocks and max_model_len bound it; `static` pads every step, a tail of
    more than `max_rows` rows to its graphs."""

    options: BlockOptions
    block_size: int = 4
    num_blocks: int = 128
    max_model_len: int = 128
    max_num_seqs: int = 4
    max_rows: int = 4
    static: bool = False
    reuse_all: bool = False
    implementation: str = "auto"
    choice: str = "auto"
    seed: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.num_blocks, self.block_size, KV_HEADS, DIM)
        # whatever no token was written to must never be seen
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.keys[0], self.values[0] = 0, 0
        self.sizes = ServerSizes(
            self.max_model_len, self.max_num_seqs, self.max_rows, self.block_size, self.num_blocks, self.static
        )._replace(remainder_rows=self.block_size)
        self.limits = selection_limits(self.options, self.sizes)
        self.state = SelectionState(self.num_blocks, self.limits, bounded=self.static)
        kind = SummaryKind(self.options.summary)
        layers, narrow = [SelectionLayer(self.keys, SCALE)], self.options.narrow_summaries
        self.selector = BlockSelector(
            layers, kind, self.limits, scoring=Scoring(implementation=self.choice), narrow=narrow
        )
        self.free = list(np.random.default_rng(self.seed).permutation(np.arange(1, self.num_blocks)))
        limits = Limits(64, self.max_num_seqs, self.max_model_len, self.block_size, self.num_blocks, False)
        self.bucket_limits = limits
        self.inputs = _inputs(limits, self.limits)
        self.remainders = remainder_shapes(limits, self.limits)
        if self.remainders is not None:
            self.remainder_inputs = _inputs(self.remainders.limits, self.limits.of_remainder())

    def tokens(self, request_id: str, positions: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [n, heads, dim], k and v [n, kv heads, dim] of a request's tokens."""
        random = torch.Generator().manual_seed(sum(map(ord, request_id)) * 1000 + self.seed)
        everything = torch.randn(self.max_model_len, HEADS + 2 * KV_HEADS, DIM, generator=random)
        q, k, v = everything[positions.start : positions.stop].split([HEADS, KV_HEADS, KV_HEADS], 1)
        return 3 * q, k, v

    def step(self, members: list[Member]) -> dict[str, Seen]:
        """Runs a step and returns what each request got."""
        batch = self._batch(members)
        drafts = np.array([member.drafts for member in members])
        decisions = {m.request_id: m.decision for m in members if m.decision is not None}
        chosen_of = self.state.step([m.request_id for m in members], batch, drafts, decisions)
        self.state.summaries.check_integrity()
        self.state.slots.check_integrity()
        plan = plan_batch(batch, self.block_size, selection=chosen_of.input)
        flat = [members[index] for index in plan.requests.tolist()]
        tensors = [self.tokens(m.request_id, range(m.computed, m.computed + m.new)) for m in flat]
        query, key, value = (torch.cat(part) for part in zip(*tensors, strict=True))
        rows = plan.num_rows
        if self.static:
            inputs = self._padded(plan, chosen_of.summary_blocks)
            pads = len(inputs.slots) - rows
            query, key, value = (
                torch.cat([t, t.new_full((pads, *t.shape[1:]), torch.nan)]) for t in (query, key, value)
            )
            key[rows:], value[rows:] = 0, 0
            slots, parts, selection = inputs.slots, inputs.parts, inputs.selection
            summary_blocks = inputs.summary_blocks
        else:
            staged = TrueShapeTensors(CPU, False, self.limits).stage(
                PlannedStep.of_tokens(plan, np.zeros(rows, np.int64))
            )[0]
            slots, parts, selection = staged.slots, staged.parts, staged.selection
            summary_blocks = torch.from_numpy(chosen_of.summary_blocks)
        write_kv(key, value, self.keys.flatten(0, 1), self.values.flatten(0, 1), slots)
        reused = not self.static and plan.selection is not None and bool((plan.selection.modes == 1).all())
        implementation = "reference" if self.static and self.implementation != "cuda" else self.implementation
        metadata = step_metadata(
            slots, parts, self.block_size, implementation, None, summary_blocks, selection, reused=reused
        )
        if self.choice != "auto" and metadata.selection is not None:
            # as for a worker that has this option
            choices = LayerSelection(metadata.selection.tensors, None, reused, False, None, self.choice, metadata.parts)
            metadata = replace(metadata, selection=choices)
        self.selector.layers[0].summarise(self.keys, summary_blocks)
        chosen = None
        if metadata.selection is not None:
            self.selector.begin(metadata.selection)
            self.selector.layers[0].choose(query, metadata.selection)
            self.selector.end(metadata.selection)
            chosen = metadata.selection.chosen
        out = unified_attention(
            query, key, value, self.keys, self.values, metadata.parts, AttentionSpec(SCALE), selected_blocks=chosen
        )
        seen = {}
        for index, member in enumerate(flat):
            lo, hi = plan.query_start[index : index + 2].tolist()
            seen[member.request_id] = Seen(out[lo:hi])
        if plan.selection is not None and chosen is not None:
            self._name_chosen(seen, flat, plan, chosen)
        return seen

    def _padded(self, plan: UnifiedPlan, summary_blocks: np.ndarray) -> StepInputs:
        """The step in a bucket that is somewhat larger, or in that of a tail."""
        shape = true_shape(plan, 0 if plan.unique is None else len(plan.unique.blocks))
        token_ids = np.zeros(plan.num_rows, np.int64)
        if self.remainders is not None and is_remainder(plan, self.max_rows):
            found = self.remainders.lookup(shape)
            tensor = self.remainder_inputs.fill(found, PlannedStep.of_tokens(plan, token_ids, summary_blocks))
            return self.remainder_inputs.split(tensor, found)
        slack = shape._replace(
            query_len=shape.query_len + 3,
            shared_blocks=shape.shared_blocks + 2 * (shape.shared_blocks > 0),
            unique_blocks=shape.unique_blocks + 2 * (shape.unique_blocks > 0),
            selected_blocks=shape.selected_blocks + 3 if shape.selected_blocks else 0,
        )
        return self.inputs.split(
            self.inputs.fill(slack.forward, PlannedStep.of_tokens(plan, token_ids, summary_blocks)), slack.forward
        )

    def _name_chosen(self, seen: dict[str, Seen], flat: list[Member], plan: UnifiedPlan, chosen: torch.Tensor) -> None:
        assert plan.selection is not None
        starts = plan.query_start.tolist()
        for span, first in enumerate(plan.selection.first_rows.tolist()):
            member = flat[starts.index(first)]
            blocks = chosen[: len(plan.selection.choice_spans)][torch.from_numpy(plan.selection.choice_spans == span)]
            seen[member.request_id].chosen = [self.tables[member.request_id].index(b) for b in blocks.tolist()]

    def dense(self, member: Member, blocks: set[int] | None = None) -> torch.Tensor:
        """The oracle, float64 [new, heads, dim]: every position up to a row's own, or those in `blocks` of them."""
        end = member.computed + member.new
        q, _, _ = self.tokens(member.request_id, range(member.computed, end))
        _, k, v = self.tokens(member.request_id, range(0, end))
        k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("rhd,shd->rhs", q.double(), k) * SCALE
        position = torch.arange(end)
        visible = position[None] <= torch.arange(member.computed, end)[:, None]
        if blocks is not None:
            visible &= torch.tensor([int(p) // self.block_size in blocks for p in position])[None]
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        return torch.einsum("rhs,shd->rhd", weights, v)

    def finish(self, request_id: str) -> None:
        """Ends a request: its blocks and its id are free again."""
        self.free += self.tables.pop(request_id, [])
        self.state.forget([request_id])

    def _batch(self, members: list[Member]) -> BatchInput:
        for member in members:
            table = self.tables.setdefault(member.request_id, [])
            while len(table) * self.block_size < member.computed + member.new:
                table.append(int(self.free.pop(0)))
        width = max(len(self.tables[m.request_id]) for m in members) + 1
        tables = np.full((len(members), width), np.iinfo(np.int32).max, np.int32)
        for row, member in enumerate(members):
            tables[row, : len(self.tables[member.request_id])] = self.tables[member.request_id]
        computed = np.array([m.computed for m in members], np.int32)
        new = np.array([m.new for m in members], np.int32)
        return BatchInput(computed, new, computed + new, (tables,))


def _inputs(limits: Limits, choices: SelectionLimits) -> BucketTensors:
    return BucketTensors(limits, 512, CPU, choices=choices)


def select(
    budget: tuple[int, int, int], mode: SelectionMode = SelectionMode.SELECT, threshold: int = 0
) -> RequestSelection:
    """A decision from (sink_blocks, window_start, num_selected)."""
    return RequestSelection(mode, *budget, threshold)
