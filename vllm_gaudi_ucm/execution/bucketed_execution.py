"""Steps in static shapes: each is padded to the cheapest warm bucket that dominates it, and replayed as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, divide_batch
from vllm_gaudi_ucm.execution.decoder import step_metadata
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.graph_manager import (
    BucketTensors,
    Compile,
    ForwardGraphs,
    Stage,
    cut_copies,
    cut_views,
    uncompiled,
)
from vllm_gaudi_ucm.execution.step_tensors import NO_BLOCKS, StepInputs, true_shape
from vllm_gaudi_ucm.graphs.runners.base import GraphRunner, Replay, StaticFunction
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShapes
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.ops.unified_attention.api import plan_of

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


def remainder_shapes(limits: Limits, choices: SelectionLimits | None) -> RemainderShapes | None:
    """The shapes of a server's graphs for prompt remainders; None where no prompt is loaded in part.

    limits, choices: of the server; None: no sparse method.
    """
    if choices is None or not choices.remainder_rows:
        return None
    return RemainderShapes(limits, choices.remainder_rows, choices.live_blocks, choices.most)


def is_remainder(plan: UnifiedPlan, most_rows: int) -> bool:
    """Whether a step needs a graph for prompt remainders: its choice has more rows than the `most_rows` of a bucket."""
    return plan.selection is not None and bool((plan.selection.num_rows > most_rows).any())


class BucketedExecution:
    """See Execution. Forward graphs are found by (phase, q, s, u), logits graphs by their rows alone.

    The forward graph leaves its hidden states in a buffer for the largest step and the logits graph reads rows of
    that, so neither depends on the other's bucket.

    Without a sparse method nothing is selected, whatever the buckets have room for: a draft model is dense beside a
    target that is not. Buckets that differ in selected blocks alone are then one graph.

    The remainder of a prompt that was loaded in part has graphs of its own; `remainders` are their shapes, None where
    no prompt is loaded in part.

    Args:
        decoder: the model.
        ready: the buckets, and which of them are warm.
        causal_slice: rows per slice of the causal part.
        device: where the model runs.
        make_runner: the kind of graphs.
        stage: entered around everything that runs on the device.
        pin_memory: see BucketTensors.
        sparse: a sparse method, where one is on.
        implementation: of attention, one that may run while a graph is captured.
        compiler: of the decoder's regions; None: they are not compiled.
    """

    def __init__(
        self,
        decoder: Decoder,
        ready: ReadyBuckets,
        causal_slice: int,
        device: torch.device,
        make_runner: Callable[[StaticFunction], GraphRunner],
        stage: Stage,
        pin_memory: bool = False,
        sparse: SparseWorker | None = None,
        implementation: str = "reference",
        compiler: StaticCompiler | None = None,
    ) -> None:
        cut = cut_views if compiler is None else compiler.region(cut_copies)
        plan = None if compiler is None else plan_of(implementation)
        self._plan = None if compiler is None or plan is None else compiler.region(plan)
        self.ready = ready
        self._sparse = sparse
        if sparse is not None and compiler is not None:
            sparse.compile(compiler.region)
        self._implementation = implementation
        self._decoder = decoder
        self._stage = stage
        choices = None if sparse is None else sparse.limits
        self._selects = choices is not None
        limits: Limits = ready.buckets.limits if self._selects else ready.buckets.limits.dense
        self._block_size, self._contiguous = limits.block_size, limits.contiguous
        self._most_shared_blocks = ready.buckets.limits.most_shared_blocks

        def graphs(limits: Limits, choices: SelectionLimits | None) -> ForwardGraphs:
            inputs = BucketTensors(limits, causal_slice, device, pin_memory, choices, cut=cut)
            return ForwardGraphs(inputs, make_runner, self._compute, stage)

        self._ordinary = graphs(limits, choices)
        self._hidden, self._logits = _outputs(decoder, limits, device)
        self._logits_runner = make_runner(self._run_logits)
        self._logits_graphs: dict[int, Replay] = {}
        self.remainders = remainder_shapes(limits, choices)
        self._remainders: ForwardGraphs | None = None
        if self.remainders is not None and choices is not None:
            self._most_rows = choices.max_rows
            self._remainders = graphs(self.remainders.limits, choices.of_remainder())
        self._graphs = self._ordinary
        self._shape: StepShape

    @property
    def max_logits(self) -> int:
        return self._logits.shape[0]

    @property
    def logits_width(self) -> int:
        """Columns of the logits."""
        return self._logits.shape[1]

    def divide(self, batch: BatchInput, remainders: NDArray[np.int64] = NO_REMAINDERS) -> list[NDArray[np.int64]]:
        return divide_batch(batch, self._block_size, self._most_shared_blocks, remainders.tolist())

    def stage(
        self, plan: UnifiedPlan, token_ids: NDArray[np.int64], summary_blocks: NDArray[np.int64] = NO_BLOCKS
    ) -> StepShape:
        true = true_shape(plan, self._unique_blocks(plan))
        self._graphs = self._graphs_of(plan)
        padded = self._lookup(true)
        self._graphs.fill(padded.forward, plan, token_ids, summary_blocks)
        self._shape = StepShape(true, padded, remainder=self._graphs is not self._ordinary)
        return self._shape

    def forward(self) -> None:
        self._graphs.replay()

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        if not len(rows):
            return self._logits[:0]
        bucket = self.logits_bucket(len(rows))
        self._ordinary.inputs.fill_logits_rows(bucket, rows)
        with self._stage("logits"):
            self._logits_graphs[bucket]()
        return self._logits[:bucket]

    def logits_bucket(self, count: int) -> int:
        """Rows of the cheapest warm logits graph for `count` rows."""
        if count == self._shape.true.logits:
            # a second lookup would count the step twice for the buckets that it still waits for
            return self._shape.padded.logits
        return self._lookup(self._shape.true._replace(logits=count)).logits

    def warm_forward(self, shape: ForwardShape) -> None:
        """Captures and executes the graph of a bucket over pads, which read and write the dummy block only."""
        if not self._selects:
            shape = shape.with_selected(0)
        self._ordinary.warm(shape)
        self._shape = StepShape(shape.step(0), shape.step(0))

    def warm_remainder(self, shape: ForwardShape) -> None:
        """Captures and executes the graph of one of `remainders`."""
        assert self._remainders is not None, "no graphs for prompt remainders where no prompt is loaded in part"
        self._remainders.warm(shape)

    def warm_logits(self, rows: int) -> torch.Tensor:
        """Captures and executes the graph of `rows` logits rows; returns the logits, float32 [rows, vocabulary]."""
        chosen = self._ordinary.inputs.fill_logits_rows(rows, np.zeros(rows, np.int64))
        with self._stage("logits"):
            self._logits_graphs[rows] = self._logits_runner.capture((chosen,))
        return self._logits[:rows]

    def refill(self) -> None:
        """Every tensor that outlives a step anew, after a warm-up that computed nothing."""
        for graphs in filter(None, (self._ordinary, self._remainders)):
            graphs.inputs.refill()
        self._hidden.zero_()
        self._logits.zero_()

    def _graphs_of(self, plan: UnifiedPlan) -> ForwardGraphs:
        return (
            self._remainders if self._remainders is not None and is_remainder(plan, self._most_rows) else self._ordinary
        )

    def _lookup(self, step: Bucket) -> Bucket:
        """The cheapest warm bucket, or the shape for prompt remainders, that dominates a step of the staged kind."""
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
            self._sparse,
            inputs.summary_blocks,
            inputs.selection,
            plan=self._plan,
        )
        if self._sparse is not None:
            self._sparse.begin_forward(metadata.selection)
        hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, metadata)
        if self._sparse is not None:
            self._sparse.end_forward(metadata.selection)
        self._hidden[: len(hidden)].copy_(hidden)

    def _run_logits(self, rows: torch.Tensor) -> None:
        self._logits[: len(rows)].copy_(self._decoder.logits(self._hidden, rows))

    def _unique_blocks(self, plan: UnifiedPlan) -> int:
        if plan.unique is None:
            return 0
        return int(plan.unique.blocks.max()) + 1 if self._contiguous else len(plan.unique.blocks)


def _outputs(decoder: Decoder, limits: Limits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers of the largest step: hidden states [rows, hidden size] and logits float32 [requests, vocabulary].

    One row through the model tells the sizes; some models have other ones than their configuration says.
    """
    one = torch.zeros(1, dtype=torch.int64, device=device)
    hidden = decoder.hidden(one, one, None)
    logits = decoder.logits(hidden)
    return (
        hidden.new_zeros((limits.max_num_batched_tokens, hidden.shape[1])),
        logits.new_zeros((limits.max_num_seqs, logits.shape[1])),
    )


def put_rows(whole: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """In place: `whole` has storage of its own, and nothing but this writes it."""
    whole.index_copy_(0, places, rows)


def take_rows(whole: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return whole.index_select(0, places)


class DividedLogits:
    """One buffer with a row for each slot, and one more for the padding of the parts; one more buffer for each draft.

    Args:
        execution: whose logits they are.
        device: where they are.
        stage: entered around device work.
        region: makes regions of it.
    """

    def __init__(
        self, execution: BucketedExecution, device: torch.device, stage: Stage, region: Compile = uncompiled
    ) -> None:
        self._stage = stage
        self._put_rows, self._take_rows = region(put_rows), region(take_rows)
        self._execution = execution
        self._whole = [torch.zeros(execution.max_logits + 1, execution.logits_width, device=device)]
        self._host = torch.zeros(execution.max_logits, dtype=torch.int64)
        self._places: dict[int, torch.Tensor] = {}

    def reserve(self, num_drafts: int) -> None:
        """Allocates the buffers of `num_drafts` drafts per request. Call it before warm-up."""
        self._whole += [torch.zeros_like(self._whole[0]) for _ in range(num_drafts)]

    def put(self, logits: torch.Tensor, slots: NDArray[np.int64], count: int, position: int = 0) -> torch.Tensor:
        """Copies a part's rows [at least len(slots), vocabulary] to their slots.

        position: of the drafts; 0 is the last certain token.

        Returns the rows of all slots, `count` of them and padding up to a bucket, as far as they were put.
        """
        self._copy(logits, slots, self._whole[position])
        return self._whole[position][: self._execution.logits_bucket(count)]

    def take(self, slots: NDArray[np.int64], position: int) -> torch.Tensor:
        """The rows of some slots, in this order, and padding up to a bucket: [at least len(slots), vocabulary]."""
        return self._select(slots, self._execution.logits_bucket(len(slots)), self._whole[position])

    def warm(self, logits: torch.Tensor) -> None:
        """Executes the copies once for this number of rows; they write padding only."""
        self._copy(logits, np.zeros(0, np.int64), self._whole[0])
        if len(self._whole) > 1 and len(logits):
            self._select(np.zeros(0, np.int64), len(logits), self._whole[0])

    def refill(self) -> None:
        """See BucketedExecution."""
        for tensor in (*self._whole, *self._places.values()):
            tensor.zero_()

    def _copy(self, logits: torch.Tensor, slots: NDArray[np.int64], whole: torch.Tensor) -> None:
        if not len(logits):
            return
        places = self._stage_places(slots, len(logits))
        with self._stage("divided logits"):
            self._put_rows(whole, places, logits)

    def _select(self, slots: NDArray[np.int64], rows: int, whole: torch.Tensor) -> torch.Tensor:
        places = self._stage_places(slots, rows)
        with self._stage("divided logits, drafts"):
            found: torch.Tensor = self._take_rows(whole, places)
            return found

    def _stage_places(self, slots: NDArray[np.int64], rows: int) -> torch.Tensor:
        """int64 [rows] on the device: the slots and, behind them, the row of the padding."""
        self._host[: len(slots)] = torch.from_numpy(slots)
        self._host[len(slots) : rows] = len(self._whole[0]) - 1
        places = self._places.get(rows)
        if places is None:
            places = self._places[rows] = torch.zeros(rows, dtype=torch.int64, device=self._whole[0].device)
        places.copy_(self._host[:rows])
        return places
