"""The worker's side of a sparse method, which the runner calls in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import ismethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.narrow_floats import has_e4m3
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.protocol.attachments import attach_buckets, attach_report, attach_sparse_meta, sparse_meta_of
from vllm_gaudi_ucm.sparse.base import UcmSparseBase
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.budget import block_budget, prompt_budget
from vllm_gaudi_ucm.sparse.selection.block_scorer import OverRanks
from vllm_gaudi_ucm.sparse.selection.block_selector import (
    BlockSelector,
    ChoosingLayers,
    KeptQueries,
    Region,
    SelectionLayer,
)
from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection, Scoring
from vllm_gaudi_ucm.sparse.selection.selection_limits import PromptTiles, SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_state import DENSE_STEP, SelectionState, StepSelection

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.observability.room_metrics import SparseMetrics
    from vllm_gaudi_ucm.protocol.offload import OffloadOrders, OffloadReport
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.sparse.late_decisions import LateDecisions
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput


# Reading the device's counts waits for the device, which has no other work left after sampling.
STEPS_PER_READ = 16


_NO_HOOKS = (UcmSparseBase.attention_begin, UcmSparseBase.attention_finished)


def _is_none(hook: object) -> bool:
    """Returns whether a hook of a layer is the default, which does nothing."""
    return ismethod(hook) and hook.__func__ in _NO_HOOKS


class ServerSizes(NamedTuple):
    """The sizes that determine the tensors of a choice.

    max_rows: rows of a decode with its drafts. num_blocks: of the KV cache. static: graphs of fixed shapes.
    some_offloaded: whether KV offload is on. remainder_rows: see SelectionLimits. batch_rows: the most rows of a step.
    """

    max_model_len: int
    max_num_seqs: int
    max_rows: int
    block_size: int
    num_blocks: int
    static: bool
    some_offloaded: bool = False
    remainder_rows: int = 0
    batch_rows: int = 0


class LayerPlace(NamedTuple):
    """The layers of the model that a worker has: a part of them with pipeline stages.

    first: index of the first layer here. total: number of the model's layers.
    numbers: indices in the model of the layers here that see whole contexts, if others have windows or chunks; None:
        all of them do, from `first` on.
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
    """The worker's objects for a method that chooses blocks.

    limits: sizes of choices. state: the host's state. selector: the tensors on the device.
    """

    limits: SelectionLimits
    state: SelectionState
    selector: BlockSelector

    @classmethod
    def from_layers(
        cls,
        method: BlockSparse,
        layers: Sequence[SelectionLayer],
        sizes: ServerSizes,
        kept: KeptQueries | None = None,
        over_ranks: OverRanks | None = None,
        place: LayerPlace | None = None,
        device: torch.device | None = None,
    ) -> BlockSelection:
        """Makes the objects. layers: this worker's layers that see whole contexts, in the model's order. kept: see
        BlockSelector. over_ranks: the mean over the ranks if there are several; the method's options may leave it
        unused. place: the place of the layers in the model; None: they are all of it. device: of the KV cache; None: of
        the first layer.

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
            # layers with windows are not counted: consecutive layers that share a choice must all choose
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
    """Calls the hooks of a method, and keeps the state on host and device for one that chooses blocks.

    Args:
        method: in the role WORKER, with its KV caches registered.
        selection: for a method that chooses blocks.
        late: decides what the scheduler could not know yet; None: the scheduler has decided.
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
        """Returns whether the method currently acts around the attention of a layer: a recorder may come and go."""
        method = self.method
        # an object may also have its own hooks, and one that wraps another has that one's
        return not (_is_none(method.attention_begin) and _is_none(method.attention_finished))

    @property
    def has_dense_layers(self) -> bool:
        return self.selector is not None and None in self.selector.leaders

    @property
    def implementation(self) -> str:
        """The implementation of block selection; `auto` for a method that chooses no blocks."""
        return AUTO if self.selector is None else self.selector.implementation

    @property
    def counters(self) -> tuple[torch.Tensor, ...] | None:
        """Tensors to which choices add, apart from their results, if layers are native calls alone; otherwise None."""
        if self.selector is None or self.watches_layers or not self.selector.is_native_calls:
            return None
        return self.selector.checks, self.selector.recall

    def compile(self, region: Region) -> None:
        """Compiles the code that runs before and after the layers from now on."""
        if self.selector is not None:
            self.selector.compile(region)

    def summarises_behind(self, selection: object) -> bool:
        """Returns whether full blocks may get their summaries after the layers: the step does not need them, and the
        method does not watch layers. selection: the step's choices, None without any.
        """
        return selection is None and self.selector is not None and not self.watches_layers

    def begin_forward(self, selection: LayerSelection | None) -> None:
        """Called before the layers run, inside the step's graph if there is one. selection: the step's choices."""
        if self.selector is not None and selection is not None:
            self.selector.begin(selection)

    def end_forward(self, selection: LayerSelection | None, full_blocks: torch.Tensor | None = None) -> None:
        """Called when the layers have run. full_blocks: int64 [n], if the layers have not summarised them."""
        if self.selector is not None and selection is not None:
            self.selector.end(selection)
        if self.selector is not None and full_blocks is not None:
            self.selector.summarise(full_blocks)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Called before a step is planned. Requests that finish, begin or resume have no stored choice: ids recur."""
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
        """Makes the decisions that the scheduler has left open, before the step, or its first division, is planned."""
        if self._late is not None:
            meta = self._late.decide(scheduler_output, drafts, requests, batch)
            self._locks, self._dense_steps = meta.locks, meta.dense_steps
            attach_sparse_meta(scheduler_output, meta)

    def send_buckets(self, buckets: object) -> None:
        """Sends buckets to the scheduler with the next step. buckets: a `BucketSet`; pads cost as much as blocks."""
        self._buckets = buckets

    def finished(self, drafts: StepDrafts, output: ModelRunnerOutput) -> None:
        """Takes the number of accepted drafts after a step, and attaches the report for the scheduler."""
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
        if self.offload is not None:
            self.offload.close()

    def loaded(self, blocks: NDArray[np.int64], summarised: NDArray[np.int64]) -> None:
        """Called when a connector fills these blocks, int64 [n]: their old summaries are of other keys.

        summarised: int64 [n], the blocks among them that come with their summaries.
        """
        if self.state is not None:
            self.state.summaries.written(blocks)
            self.state.summaries.brought(summarised)

    def step(
        self, scheduler_output: SchedulerOutput, drafts: StepDrafts, requests: Sequence[LiveRequest], batch: BatchInput
    ) -> StepSelection:
        """Returns the candidates of the step, or of a division of it."""
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
        """Returns the indices of requests with more rows that choose together than an ordinary graph has room for."""
        if self.limits is None or not self.limits.remainder_rows:
            return NO_REMAINDERS
        meta = sparse_meta_of(scheduler_output)
        sparse = {} if meta is None else meta.requests
        (many,) = (batch.num_scheduled > self.limits.max_rows).nonzero()
        remainders = [index for index in many.tolist() if requests[index].request_id in sparse]
        return np.array(remainders, np.int64)

    def report(self) -> None:
        """Reports after a step. The device's counts are read only from time to time, because reading waits for the
        device; without choices there are no new counts.
        """
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
    """Returns how large the choices of a server can be."""
    longest = block_budget(sizes.max_model_len, sizes.block_size, options)
    most, tiles = max(1, 0 if longest is None else longest.num_selected), None
    room = sizes.max_num_seqs * most
    if options.prompt_ratio is not None:
        longest = prompt_budget(sizes.max_model_len, sizes.block_size, options)
        chosen = max(1, 0 if longest is None else longest.num_selected)
        tiles = PromptTiles(options.prompt_tile, options.prompt_ratio, chosen)
        most = max(most, chosen)
        if not sizes.static:
            # every request of a step may end in the middle of a tile
            room += (sizes.batch_rows // tiles.rows + sizes.max_num_seqs) * chosen
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
        tiles=tiles,
    )


def summary_share(options: BlockOptions, block_size: int, head_size: int, value_size: int, key_bytes: int) -> float:
    """Returns the bytes of a block's summaries divided by the bytes of its keys and values."""
    kind = SummaryKind(options.summary)
    summary = kind.vectors(block_size) * kind.width(head_size) * options.summary_itemsize(key_bytes)
    return summary / (block_size * (head_size + value_size) * key_bytes)


def score_flops(options: BlockOptions, block_size: int, heads: int, head_size: int) -> float:
    """Returns the operations with which a row scores a block in one layer."""
    kind = SummaryKind(options.summary)
    return 2 * heads * kind.products(block_size, head_size)
