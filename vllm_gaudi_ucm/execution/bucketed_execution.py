"""Runs steps in static shapes: each is padded to the cheapest warm bucket that holds it, and replayed as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput, UnifiedPlan
from vllm_gaudi_ucm.batch.block_use import Room
from vllm_gaudi_ucm.batch.division import divide_batch
from vllm_gaudi_ucm.execution.agreed_bucket import agreed_bucket
from vllm_gaudi_ucm.execution.attention_group import StepMetadata, step_metadata
from vllm_gaudi_ucm.execution.decoder import HIDDEN, Decoder, DecoderStep
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.graph_manager import (
    BucketTensors,
    ForwardGraphs,
    LogitsRows,
    Stage,
    cut_copies,
    cut_views,
)
from vllm_gaudi_ucm.execution.handover import Handover
from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
from vllm_gaudi_ucm.execution.step_tensors import StepInputs, true_shape
from vllm_gaudi_ucm.graphs.runners.base import GraphRunner, Replay, StaticFunction
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShapes
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.ops.registry import has_kernels
from vllm_gaudi_ucm.ops.unified_attention.api import plan_of

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.planned_step import PlannedStep
    from vllm_gaudi_ucm.distributed.stage import StageTensors
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


def remainder_shapes(limits: Limits, choices: SelectionLimits | None) -> RemainderShapes | None:
    """Returns the shapes of a server's graphs for prompt remainders; None if no prompt is loaded in part.

    limits: limits of the server. choices: sizes of its choices of blocks; None without a sparse method.
    """
    if choices is None or not choices.remainder_rows:
        return None
    if choices.tiles is not None:
        tiles = choices.tiles.most, choices.tiles.rows
        return RemainderShapes(limits, choices.remainder_rows, choices.live_blocks, *tiles)
    return RemainderShapes(limits, choices.remainder_rows, choices.live_blocks, choices.most)


def is_remainder(plan: UnifiedPlan, most_rows: int) -> bool:
    """Returns whether a step needs a prompt-remainder graph: it chooses for more than `most_rows` of a bucket."""
    return plan.selection is not None and bool((plan.selection.num_rows > most_rows).any())


# For more rows at once, the memory of the logits costs more than the time saved by one product with the output head.
MOST_VERIFIED = 512


class Capture(NamedTuple):
    """Settings for the capture of graphs.

    make_runner: makes graphs of one kind. stage: context around all device work. causal_slice: rows per slice of the
        causal part. pin_memory: see BucketTensors. implementation: implementation of attention that may run while a
        graph is captured. compiler: compiler of the decoder's regions; None if they are not compiled.
    """

    make_runner: Callable[[StaticFunction], GraphRunner]
    stage: Stage
    causal_slice: int
    pin_memory: bool = False
    implementation: str = "reference"
    compiler: StaticCompiler | None = None


class BucketedExecution:
    """Runs steps in buckets; see Execution. Forward graphs have the key (phase, q, s, u), logits graphs only their
    rows.

    The forward graph leaves its hidden states in a buffer for the largest step and the logits graph reads rows of that,
    so neither depends on the other's bucket.

    Without a sparse method no blocks are selected, even if the buckets have room for them: a draft model can be dense
    with a sparse target. Buckets that differ only in selected blocks then share one graph.

    The remainder of a prompt that was loaded in part has separate graphs; `remainders` are their shapes, None if no
    prompt is loaded in part.

    Engines that share out experts agree on a bucket before each forward, because its graph holds collectives between
    them.

    A stage of a pipeline receives before a replay, and sends after it; only the last stage computes logits.

    Args:
        ready: the buckets, and which of them are warm.
        capture: settings for the capture of graphs.
        sparse: a sparse method, if one is on.
        carried: tokens that the host may not know yet when a step is copied to the device; None if it knows all.
        rows_each: rows of a request whose tokens are verified in a step: its drafts and one more.
        groups: groups of the KV cache; None for one group with all layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        ready: ReadyBuckets,
        device: torch.device,
        capture: Capture,
        *,
        sparse: SparseWorker | None = None,
        carried: CarriedTokens | None = None,
        rows_each: int = 1,
        groups: LayerGroups | None = None,
    ) -> None:
        make_runner, stage, causal_slice, pin_memory, implementation, compiler = capture
        self._carried = carried
        cut = cut_views if compiler is None else compiler.region(cut_copies)
        plan = None if compiler is None else plan_of(implementation)
        self._plan = None if compiler is None or plan is None else compiler.region(plan)
        self.ready = ready
        self._sparse = sparse
        if sparse is not None and compiler is not None:
            sparse.compile(compiler.region)
        self._implementation = implementation
        self._decoder = decoder
        self._handover = None if decoder.stage is None else Handover(decoder, decoder.stage, device)
        self._stage = stage
        choices = None if sparse is None else sparse.limits
        self._selects = choices is not None
        limits: Limits = ready.buckets.limits if self._selects else ready.buckets.limits.dense
        self._block_size, self._contiguous = limits.block_size, limits.contiguous
        self._groups = groups or LayerGroups.alone(limits.block_size, decoder.window)
        self._room = Room(ready.buckets.limits.most_shared_blocks, ready.buckets.limits.max_context_blocks)

        def graphs(limits: Limits, choices: SelectionLimits | None) -> ForwardGraphs:
            inputs = BucketTensors(
                limits,
                causal_slice,
                device,
                pin_memory=pin_memory,
                choices=choices,
                groups=self._groups.groups,
                inputs=decoder.inputs,
                cut=cut,
            )
            return ForwardGraphs(inputs, make_runner, self._compute, stage)

        self._ordinary = graphs(limits, choices)
        self._logits_rows = LogitsRows(limits.max_num_seqs * rows_each, device, pin_memory)
        self._hidden, self._logits = _outputs(decoder, limits, device)
        self._logits_runner = make_runner(self._run_logits)
        self._logits_graphs: dict[int, Replay] = {}
        self._rows_each = rows_each
        self._likeliest = torch.zeros(_likeliest_room(limits, rows_each), dtype=torch.int64, device=device)
        self._likeliest_runner = make_runner(self._run_likeliest)
        self._likeliest_graphs: dict[int, Replay] = {}
        self.remainders = remainder_shapes(limits, choices)
        self._remainders: ForwardGraphs | None = None
        if self.remainders is not None and choices is not None:
            self._most_rows = choices.max_rows
            self._remainders = graphs(self.remainders.limits, choices.of_remainder())
        self._graphs = self._ordinary
        # without a cache every step is one of prompts, which a bucket holds
        self._divides = self.ready.buckets.limits.has_cache
        self._shape: StepShape
        # whether rows choose tokens in the graph of a shape, and in what was computed or captured last
        self._choosing: dict[ForwardShape, bool] = {}
        self._chooses = False

    @property
    def max_logits(self) -> int:
        return self._logits.shape[0]

    @property
    def logits_width(self) -> int:
        return self._logits.shape[1]

    def divide(self, batch: BatchInput, remainders: NDArray[np.int64] = NO_REMAINDERS) -> list[NDArray[np.int64]]:
        if not self._divides:
            return [np.arange(len(batch.num_scheduled))]
        first = self._groups.groups[0]
        whole = batch.of_group(0)
        divisions = divide_batch(whole, first.kv.block_size, self._room, remainders.tolist(), first.kv.window)
        return self._groups.divide(batch, divisions, self._room)

    def stage(self, step: PlannedStep) -> StepShape:
        plan = step.plan
        true = true_shape(plan, self._unique_blocks(plan))
        self._graphs = self._graphs_of(plan)
        needed = self._groups.held(true, plan) if len(plan.groups) > 1 else true
        lockstep = self._decoder.lockstep
        padded = self._lookup(needed if lockstep is None else agreed_bucket(lockstep, needed))
        self._graphs.fill(padded.forward, step)
        chosen = self._decoder.chosen if self._choosing.get(padded.forward) else 0
        self._shape = StepShape(true, padded, self._graphs is not self._ordinary, chosen)
        return self._shape

    def forward(self) -> None:
        if self._handover is None:
            self._graphs.replay()
            return
        rows = self._shape.padded.query_len
        self._handover.receive(rows)
        self._graphs.replay()
        self._handover.send(rows)

    def follow(self) -> None:
        assert self._decoder.lockstep is not None, "no other engines"
        needed = agreed_bucket(self._decoder.lockstep)
        if needed.query_len:
            self._ordinary.replay_pads(self._lookup(needed).forward)

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        if not len(rows):
            return self._logits[:0]
        bucket = self.logits_bucket(len(rows))
        self._logits_rows.fill(bucket, rows)
        with self._stage("logits"):
            self._logits_graphs[bucket]()
        return self._logits[:bucket]

    def hidden_states(self, count: int) -> torch.Tensor:
        # in one size for each bucket, in which it may be copied
        return self._hidden[: self._shape.padded.query_len]

    def likeliest(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        found = min((size for size in self._likeliest_graphs if size >= len(rows)), default=None)
        if found is None or not len(rows):
            return None
        self._logits_rows.fill(found, rows)
        with self._stage("likeliest tokens"):
            self._likeliest_graphs[found]()
        return self._likeliest[:found]

    def logits_bucket(self, count: int) -> int:
        """Returns the rows of the cheapest warm logits graph for `count` rows."""
        if count == self._shape.true.logits:
            # a second lookup would count the step twice for the buckets that it is waiting for
            return self._shape.padded.logits
        return self._lookup(self._shape.true._replace(logits=count)).logits

    def warm_forward(self, shape: ForwardShape) -> None:
        """Captures and executes the graph of a bucket over pads, which read and write the dummy block only."""
        if not self._selects:
            shape = shape.with_selected(0)
        if self._handover is not None:
            self._handover.reserve(shape.query_len)
        self._ordinary.warm(shape)
        self._choosing.setdefault(shape, self._chooses)
        self._shape = StepShape(shape.step(0), shape.step(0))

    @property
    def compiles_kernels(self) -> bool:
        """Returns whether `compute_pads` finds kernels to compile ahead; a pipeline stage would wait for others."""
        return self._handover is None and has_kernels(self._hidden.device.type)

    def compute_pads(self, shape: ForwardShape) -> None:
        """Computes a bucket of this shape over pads, without a graph, and discards the results."""
        self._compute_over_pads(self._ordinary, shape if self._selects else shape.with_selected(0))

    def compute_remainders(self) -> None:
        """Computes every shape of `remainders` over pads, without a graph."""
        if self._remainders is not None and self.remainders is not None:
            for shape in self.remainders.shapes:
                self._compute_over_pads(self._remainders, shape)

    def _compute_over_pads(self, graphs: ForwardGraphs, shape: ForwardShape) -> None:
        self._compute(graphs.inputs.split(graphs.inputs.fill_pads(shape), shape))

    def warm_remainder(self, shape: ForwardShape) -> None:
        """Captures and executes the graph of one of the shapes in `remainders`."""
        assert self._remainders is not None, "no graphs for prompt remainders where no prompt is loaded in part"
        if self._handover is not None:
            self._handover.reserve(shape.query_len)
        self._remainders.warm(shape)

    def warm_logits(self, rows: int) -> torch.Tensor:
        """Captures and executes the graph of `rows` logits rows; returns the logits, float32 [rows, vocabulary].

        Without the last layer, or if the model pools, there is no graph, and the logits have no columns.
        """
        if not self._decoder.has_logits:
            return self._logits[:rows]
        chosen = self._logits_rows.fill(rows, np.zeros(rows, np.int64))
        with self._stage("logits"):
            self._logits_graphs[rows] = self._logits_runner.capture((chosen,))
        self._warm_likeliest(rows * self._rows_each)
        return self._logits[:rows]

    def _warm_likeliest(self, rows: int) -> None:
        """Captures the graph for as many verified rows as belong to a logits graph, unless there are too many."""
        if rows > len(self._likeliest):
            return
        chosen = self._logits_rows.fill(rows, np.zeros(rows, np.int64))
        with self._stage("likeliest tokens"):
            self._likeliest_graphs[rows] = self._likeliest_runner.capture((chosen,))

    def refill(self) -> None:
        """Zeroes every tensor that outlives a step, after a warm-up that computed nothing."""
        for graphs in filter(None, (self._ordinary, self._remainders)):
            graphs.inputs.refill()
        self._logits_rows.refill()
        if self._handover is not None:
            self._handover.refill()
        for tensor in (self._hidden, self._logits, self._likeliest):
            tensor.zero_()

    def _graphs_of(self, plan: UnifiedPlan) -> ForwardGraphs:
        return (
            self._remainders if self._remainders is not None and is_remainder(plan, self._most_rows) else self._ordinary
        )

    def _lookup(self, step: Bucket) -> Bucket:
        """Returns the cheapest warm bucket that dominates a step, or the prompt-remainder shape if it needs one."""
        if self._graphs is not self._ordinary:
            assert self.remainders is not None, "graphs for prompt remainders have shapes"
            return self.remainders.lookup(step).step(self.ready.logits_rows(step.logits))
        best, found = self.ready.state.lookup(step)
        if found != best:
            self.ready.count(best, found)
        return found if self._selects or not found.selected_blocks else found._replace(selected_blocks=0)

    def _compute(self, inputs: StepInputs) -> None:
        metadata = step_metadata(
            inputs.slots,
            inputs.parts,
            self._block_size,
            self._implementation,
            sparse=self._sparse,
            summary_blocks=inputs.summary_blocks,
            selection=inputs.selection,
            plan=self._plan,
            latent=self._decoder.latent,
            chosen=self._decoder.chosen,
        )
        self._chooses = metadata.chooses
        if self._sparse is not None:
            self._sparse.begin_forward(metadata.selection)
        every = self._groups.metadata(metadata, inputs, self._implementation, self._plan)
        found = self._run(inputs, every)
        if self._sparse is not None:
            self._sparse.end_forward(metadata.selection)
        if self._decoder.is_last:
            hidden = found[HIDDEN]
            self._hidden[: len(hidden)].copy_(hidden)

    def _run(self, inputs: StepInputs, metadata: StepMetadata) -> StageTensors:
        rows, handover = len(inputs.token_ids), self._handover
        if handover is None:
            if self._carried is not None:
                inputs = inputs.with_tokens(self._carried.fill_in(inputs.token_ids))
            return self._decoder.run_layers(DecoderStep(inputs.rows, metadata))
        found = self._decoder.run_layers(DecoderStep(inputs.rows, metadata, handover.received(rows)))
        handover.leave(rows, found)
        return found

    def _run_logits(self, rows: torch.Tensor) -> None:
        self._decoder.write_logits(self._logits[: len(rows)], self._hidden, rows)

    def _run_likeliest(self, rows: torch.Tensor) -> None:
        logits = self._decoder.logits(self._hidden, rows)
        self._likeliest[: len(rows)].copy_(logits.argmax(-1))

    def _unique_blocks(self, plan: UnifiedPlan) -> int:
        if plan.unique is None:
            return 0
        return int(plan.unique.blocks.max()) + 1 if self._contiguous else len(plan.unique.blocks)


def _likeliest_room(limits: Limits, rows_each: int) -> int:
    """Returns the rows of the largest graph of argmax tokens; 0 without drafts."""
    return min(limits.max_num_seqs * rows_each, MOST_VERIFIED) if rows_each > 1 else 0


def _outputs(decoder: Decoder, limits: Limits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns buffers of the largest step: hidden states [rows, hidden size] and logits float32 [requests, vocabulary];
    both without columns if the last layer is on another stage, and logits without columns if the model pools.

    The sizes are measured with one row, because some models have other sizes than their configuration says.
    """
    no_logits = torch.zeros((limits.max_num_seqs, 0))
    if not decoder.is_last:
        return torch.zeros((limits.max_num_batched_tokens, 0)), no_logits
    one = decoder.run_layers(decoder.unattended(1, device))[HIDDEN]
    hidden = one.new_zeros((limits.max_num_batched_tokens, one.shape[1]))
    if not decoder.has_logits:
        return hidden, no_logits
    logits = decoder.logits(one)
    return hidden, logits.new_zeros((limits.max_num_seqs, logits.shape[1]))
