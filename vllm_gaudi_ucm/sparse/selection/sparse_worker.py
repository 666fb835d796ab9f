"""The worker's side of a sparse method: what the runner asks of it in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import ismethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.narrow_floats import has_e4m3
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.protocol.attachments import attach_buckets, attach_report, attach_sparse_meta, sparse_meta_of
from vllm_gaudi_ucm.sparse.base import UcmSparseBase
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.selection.block_selector import (
    BlockSelector,
    ChoosingLayers,
    KeptQueries,
    Region,
    SelectionLayer,
)
from vllm_gaudi_ucm.sparse.selection.layer_selector import Scoring
from vllm_gaudi_ucm.sparse.selection.selection_state import DENSE_STEP, SelectionLimits, SelectionState, StepSelection

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.observability.room_metrics import SparseMetrics
    from vllm_gaudi_ucm.protocol.offload import OffloadOrders, OffloadReport
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.sparse.late_decisions import LateDecisions
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection, OverRanks
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput


# Reading the device's counts waits for the device, which after sampling has nothing left to do but this.
STEPS_PER_READ = 16


_NO_HOOKS = (UcmSparseBase.attention_begin, UcmSparseBase.attention_finished)


def _is_none(hook: object) -> bool:
    """Whether a hook of a layer is the one that does nothing."""
    return ismethod(hook) and hook.__func__ in _NO_HOOKS


class ServerSizes(NamedTuple):
    """What the tensors of a choice are sized by.

    max_rows: rows of a decode with its drafts. num_blocks: of the KV cache. static: graphs of fixed shapes.
    some_offloaded: whether KV offload is on. remainder_rows: see SelectionLimits.
    """

    max_model_len: int
    max_num_seqs: int
    max_rows: int
    block_size: int
    num_blocks: int
    static: bool
    some_offloaded: bool = False
    remainder_rows: int = 0


class LayerPlace(NamedTuple):
    """Which layers of the model a worker has: with pipeline stages a part of them.

    first: of those here. total: of the model. numbers: in the model, of those here that see whole contexts, where
        others have windows or chunks; None: all of them do, from `first` on.
    """

    first: int
    total: int
    numbers: tuple[int, ...] | None = None


class BlockMover(Protocol):
    """KV offload in the worker: moves blocks off the device and back."""

    def begin_step(self, orders: OffloadOrders) -> None: ...

    def report(self) -> OffloadReport: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BlockSelection:
    """What a method that chooses blocks has in the worker.

    limits: sizes of choices. state: what the host keeps. selector: the tensors on the device.
    """

    limits: SelectionLimits
    state: SelectionState
    selector: BlockSelector

    @classmethod
    def of(
        cls,
        method: BlockSparse,
        layers: Sequence[SelectionLayer],
        sizes: ServerSizes,
        kept: KeptQueries | None = None,
        over_ranks: OverRanks | None = None,
        place: LayerPlace | None = None,
        device: torch.device | None = None,
    ) -> BlockSelection:
        """layers: those of this worker that see whole contexts, in the model's order. kept: see BlockSelector.
        over_ranks: the mean over the ranks where there are several, of which the method's options may make no use.
        place: of the layers in the model; None: they are all of it. device: of the KV cache; None: of the first layer.

        Raises ValueError for dense layers that the model does not have.
        """
        options = method.block_options
        first, total, numbers = place or LayerPlace(0, len(layers))
        beyond = [layer for layer in method.dense_layers if layer >= total]
        if beyond:
            raise ValueError(
                f"ucm_sparse_config: dense_layers has {beyond}, expected indices below {total}, "
                "the number of the model's attention layers"
            )
        device = device or layers[0].keys.device
        if options.narrow_summaries and not has_e4m3(device):
            raise ValueError(
                "ucm_sparse_config: summary_dtype is 'fp8', expected 'auto' on this GPU, "
                "which has no 8-bit floats: they need compute capability 8.9 or newer"
            )
        limits, dense = selection_limits(options, sizes), method.dense_layers
        if numbers is not None:
            # layers with windows are not counted: of consecutive layers that share a choice all have to choose
            first, dense = 0, tuple(place for place, number in enumerate(numbers) if number in dense)
        selector = BlockSelector(
            layers,
            SummaryKind(options.summary),
            limits,
            ChoosingLayers(method.reuse_layers, dense, first, numbers),
            Scoring(
                method.block_scores if type(method).block_scores is not BlockSparse.block_scores else None,
                over_ranks if options.scores_over_ranks == "all" else None,
                options.implementation,
            ),
            kept,
            narrow=options.narrow_summaries,
            device=device,
        )
        return cls(limits, SelectionState(sizes.num_blocks, limits, sizes.static, sizes.some_offloaded), selector)


class SparseWorker:
    """Drives the hooks of a method, and for one that chooses blocks its state on host and device.

    Args:
        method: in the role WORKER, which knows its KV caches.
        selection: of a method that chooses blocks.
        offload: moves blocks off the device and back, with KV offload.
        metrics: where figures go; None: nowhere.
        late: decides what the scheduler did not know yet; None: it has decided.
    """

    def __init__(
        self,
        method: UcmSparseBase,
        selection: BlockSelection | None = None,
        offload: BlockMover | None = None,
        metrics: SparseMetrics | None = None,
        late: LateDecisions | None = None,
    ) -> None:
        self.method = method
        self.limits = None if selection is None else selection.limits
        self.state = None if selection is None else selection.state
        self.selector = None if selection is None else selection.selector
        self.offload = offload
        self._metrics = metrics
        self._late = late
        self._steps = 0
        self._locks = (0, 0)
        self._dense_steps = 0
        self._told_locks, self._told_dense_steps = self._locks, self._dense_steps
        # whether any request was to be sparse since the last report
        self._is_asked = False
        self._buckets: object | None = None

    @property
    def watches_layers(self) -> bool:
        """Whether the method does anything around the attention of a layer, now: a recorder comes and goes."""
        method = self.method
        # also an object may have hooks of its own, and one that wraps another has that one's
        return not (_is_none(method.attention_begin) and _is_none(method.attention_finished))

    @property
    def has_dense_layers(self) -> bool:
        return self.selector is not None and None in self.selector.leaders

    @property
    def implementation(self) -> str:
        """Of block selection; `auto` for a method that chooses none."""
        return AUTO if self.selector is None else self.selector.implementation

    @property
    def counters(self) -> tuple[torch.Tensor, ...] | None:
        """What choices add to beside their results, where native calls are all that layers do; None: they do more."""
        if self.selector is None or self.watches_layers or not self.selector.is_native_calls:
            return None
        return self.selector.checks, self.selector.recall

    def compile(self, region: Region) -> None:
        """What runs before and behind the layers is compiled from now on."""
        if self.selector is not None:
            self.selector.compile(region)

    def summarises_behind(self, selection: object) -> bool:
        """Whether full blocks may get their summaries behind the layers: nobody needs them in the step, and nobody
        watches. selection: the step's choices, None without any."""
        return selection is None and self.selector is not None and not self.watches_layers

    def begin_forward(self, selection: LayerSelection | None) -> None:
        """Before the layers run, inside of the step's graph where there is one. selection: the step's choices."""
        if self.selector is not None and selection is not None:
            self.selector.begin(selection)

    def end_forward(self, selection: LayerSelection | None, full_blocks: torch.Tensor | None = None) -> None:
        """When the layers have run. full_blocks: int64 [n], where they have not summarised these themselves."""
        if self.selector is not None and selection is not None:
            self.selector.end(selection)
        if self.selector is not None and full_blocks is not None:
            self.selector.summarise(full_blocks)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Before a step is planned. Requests that finish, begin or resume have no choice stored: ids are used again."""
        finished = scheduler_output.finished_req_ids
        for request_id in finished:
            self.method.request_finished_in_worker(request_id)
        if self.state is not None:
            self.state.begin_step()
            new = [one.req_id for one in scheduler_output.scheduled_new_reqs]
            resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
            for request_ids in (finished, scheduler_output.preempted_req_ids, new, resumed):
                if request_ids:
                    self.state.forget(request_ids)
        self.method.update_states(scheduler_output)
        if self._late is not None:
            self._late.update(scheduler_output)
        meta = sparse_meta_of(scheduler_output)
        if meta is not None:
            self._locks, self._dense_steps = meta.locks, meta.dense_steps
        if self.offload is not None and meta is not None and meta.offload is not None:
            self.offload.begin_step(meta.offload)

    def decide(
        self, scheduler_output: SchedulerOutput, drafts: StepDrafts, requests: Sequence[LiveRequest], batch: BatchInput
    ) -> None:
        """Before the step, or its first division, is planned: what the scheduler has left open."""
        if self._late is not None:
            meta = self._late.decide(scheduler_output, drafts, requests, batch)
            self._locks, self._dense_steps = meta.locks, meta.dense_steps
            attach_sparse_meta(scheduler_output, meta)

    def send_buckets(self, buckets: object) -> None:
        """To the scheduler, with the next step. buckets: a `BucketSet`, whose pads cost as much as blocks."""
        self._buckets = buckets

    def finished(self, drafts: StepDrafts, output: ModelRunnerOutput) -> None:
        """After a step: takes how many of its drafts were right, and attaches what the scheduler is to know."""
        if self._late is not None:
            self._late.verified(drafts, output)
        self.attach_report(output)

    def attach_report(self, output: ModelRunnerOutput) -> None:
        """Sends the report of KV offload to the scheduler, and buckets once."""
        if self._buckets is not None:
            attach_buckets(output, self._buckets)
            self._buckets = None
        if self.offload is not None:
            attach_report(output, self.offload.report())

    def close(self) -> None:
        """Ends the threads of KV offload."""
        if self.offload is not None:
            self.offload.close()

    def loaded(self, blocks: NDArray[np.int64], summarised: NDArray[np.int64]) -> None:
        """A connector fills these blocks, int64 [n]: the summaries that they had are those of other keys.

        summarised: int64 [n], the blocks among them that come with their summaries.
        """
        if self.state is not None:
            self.state.summaries.written(blocks)
            self.state.summaries.brought(summarised)

    def step(
        self, scheduler_output: SchedulerOutput, drafts: StepDrafts, requests: Sequence[LiveRequest], batch: BatchInput
    ) -> StepSelection:
        """What the step, or a division of it, chooses among."""
        if self.state is None:
            return DENSE_STEP
        request_ids = [request.request_id for request in requests]
        num_drafts = np.zeros(len(request_ids), np.int64)
        if drafts.tokens:
            num_drafts[:] = [drafts.count(request_id) for request_id in request_ids]
        meta = sparse_meta_of(scheduler_output)
        decisions = {} if meta is None else meta.requests
        self._is_asked |= bool(decisions)
        return self.state.step(request_ids, batch, num_drafts, decisions)

    def remainders(
        self, scheduler_output: SchedulerOutput, requests: Sequence[LiveRequest], batch: BatchInput
    ) -> NDArray[np.int64]:
        """Indices of requests with more rows that choose together than an ordinary graph has room for."""
        if self.limits is None or not self.limits.remainder_rows:
            return NO_REMAINDERS
        meta = sparse_meta_of(scheduler_output)
        sparse = {} if meta is None else meta.requests
        (many,) = (batch.num_scheduled > self.limits.max_rows).nonzero()
        remainders = [index for index in many.tolist() if requests[index].request_id in sparse]
        return np.array(remainders, np.int64)

    def report(self) -> None:
        """After a step. The device's counts are read now and then only, because reading waits for the device; where
        nothing is chosen there is nothing new to tell."""
        if self._metrics is None or self.selector is None or self.state is None:
            return
        if self._locks != self._told_locks:
            self._metrics.locks(*self._locks)
            self._told_locks = self._locks
        if self._dense_steps != self._told_dense_steps:
            self._metrics.dense_steps(self._dense_steps)
            self._told_dense_steps = self._dense_steps
        if not self._is_asked and not self._steps % STEPS_PER_READ:
            return
        if self._is_asked:
            self._metrics.totals(self.state.totals)
            self._is_asked = False
        # until the counts of the last choice have been read
        self._steps += 1
        if self._steps % STEPS_PER_READ == 0:
            self._metrics.device(self.selector.counts())


def selection_limits(options: BlockOptions, sizes: ServerSizes) -> SelectionLimits:
    """How large the choices of a server can be."""
    longest = block_budget(sizes.max_model_len, sizes.block_size, options)
    most = max(1, 0 if longest is None else longest.num_selected)
    room = sizes.max_num_seqs * most
    if sizes.static:
        # requests that share blocks may choose more than there are; a graph for that many would hardly ever be used
        room = max(most, min(room, sizes.num_blocks))
    return SelectionLimits(
        sparse_ratio=options.sparse_ratio,
        # the newest block may become full and the next one begin in the same step
        live_blocks=options.init_window_sz + options.local_window_sz + 1,
        most=most,
        width=-(-sizes.max_model_len // sizes.block_size),
        max_num_seqs=sizes.max_num_seqs,
        max_rows=sizes.max_rows,
        max_selected_blocks=room,
        block_size=sizes.block_size,
        remainder_rows=sizes.remainder_rows if sizes.static else 0,
    )


def summary_share(options: BlockOptions, block_size: int, head_size: int, value_size: int, key_bytes: int) -> float:
    """Bytes of a block's summaries over the bytes of its keys and values."""
    kind = SummaryKind(options.summary)
    summary = kind.vectors(block_size) * kind.width(head_size) * options.summary_itemsize(key_bytes)
    return summary / (block_size * (head_size + value_size) * key_bytes)
