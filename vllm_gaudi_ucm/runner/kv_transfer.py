"""The worker's side of any KV connector of vLLM: the calls that the runner makes in every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.distributed.ranks import ALONE, Ranks
from vllm_gaudi_ucm.kv_cache.pair import LayerCache, in_blocks
from vllm_gaudi_ucm.observability.room_metrics import TransferTotals
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks
from vllm_gaudi_ucm.vllm_api.attention import AttentionMetadata
from vllm_gaudi_ucm.vllm_api.kv_transfer import (
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorRole,
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm_gaudi_ucm.vllm_api.model import get_forward_context, set_forward_context
from vllm_gaudi_ucm.vllm_api.steps import KVConnectorOutput, SchedulerOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.memory_mode.worker_side import StoredCopies
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig

NOTHING = TransferTotals()


class TransferWork:
    """Counts work of a connector; KvTransfer adds to it, and the runner takes it for the record of a step."""

    def __init__(self, totals: TransferTotals = NOTHING, moved: TransferTotals = NOTHING, ms: float = 0.0) -> None:
        self._totals = totals
        self.moved = moved
        self.ms = ms
        self.last_seconds = 0.0
        """Seconds of the last timed call."""

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Times a call of the connector."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_seconds = time.perf_counter() - start
            self.ms += 1e3 * self.last_seconds

    def take(self, totals: TransferTotals) -> TransferWork:
        """Returns the work counted since the last call, and restarts the count."""
        taken = TransferWork(totals, totals.since(self._totals), self.ms)
        self._totals, self.ms = totals, 0.0
        return taken

    def figures(self) -> dict[str, float]:
        return {"loaded_blocks": self.moved.loaded, "saved_blocks": self.moved.saved, "transfer_ms": self.ms}


REST_SECONDS = 0.002
"""The longest wait in a step without tokens: a request that arrives in the meantime may be seen this late."""


@dataclass(frozen=True)
class StepAttention(AttentionMetadata):
    """Stands for a step's attention in a connector's calls; the blocks of requests are in the connector's metadata."""


def copy_pairs(
    block_size: int,
    sources: Mapping[str, LayerCache],
    targets: Mapping[str, LayerCache],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    direction: str,
) -> None:
    """Copies blocks between the cache and a connector's buffers on the host, in either direction.

    sources, targets: rows of each layer, [slots, kv heads, head size].
    """
    pairs = torch.tensor([source_ids, target_ids], dtype=torch.int64).T
    for name, source in sources.items():
        for one, other in zip(in_blocks(source, block_size), in_blocks(targets[name], block_size), strict=True):
            swap_blocks([one], [other], pairs)


class KvTransfer:
    """The lifecycle of a connector in one worker.

    At true shapes, vLLM's attention layers wait for each layer's blocks and save them: they find the connector in
    vLLM's process-wide place. A graph runs no Python, so at static shapes the connector is kept out of that place; the
    runner waits for all layers before the graphs of a step, and saves them afterwards. The same always applies to this
    plugin's own connector, NIXL's and LMCache's, which have no work between layers.

    Args:
        vllm_config: the engine's config, with a `kv_transfer_config`.
        in_layers: whether the layers call the connector.
        ahead: whether a step is planned before the scheduler gets the report of the previous one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        in_layers: bool,
        ranks: Ranks = ALONE,
        *,
        ahead: bool = False,
    ) -> None:
        self._vllm_config = vllm_config
        self.in_layers = in_layers
        self._ranks = ranks
        self._ahead = ahead
        self._follows_failure = False
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._caches: dict[str, LayerCache] = {}
        self._finished_requests: set[str] = set()
        self._has_tokens = False
        self.work = TransferWork()
        self.connector: KVConnectorBase_V1
        if in_layers:
            ensure_kv_transfer_initialized(vllm_config, kv_cache_config)
            self.connector = get_kv_transfer_group()
        else:
            self.connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self._ours = our_connector(self.connector)
        """The plugin's own connector, which may be a child of the connector."""

    def allocation(self) -> AbstractContextManager[Any]:
        """Returns a context for the allocation of the KV cache: a connector may want it in its own memory."""
        return self.connector.get_mem_pool_context() or nullcontext()

    def register(self, caches: Mapping[str, LayerCache]) -> None:
        """Registers the caches unchanged. caches: cache of each layer, at the same address until the end."""
        self._caches = dict(caches)
        self.connector.register_kv_caches(self._caches)  # type: ignore[arg-type]  # vLLM's type is one tensor
        self.connector.set_host_xfer_buffer_ops(partial(copy_pairs, self._block_size))

    def report_to(self, metrics: StepMetrics) -> None:
        """Sends figures of the plugin's own connector to /metrics; others use vLLM's way."""
        if self._ours is not None:
            self._ours.worker.report_to(metrics)

    def take_work(self) -> TransferWork:
        """Returns the blocks moved since the last call, and the time that steps have spent on it."""
        return self.work.take(TransferTotals() if self._ours is None else self._ours.worker.totals())

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Begins a step, also one without tokens: loads that the step needs are complete when this returns."""
        with self.work.clock():
            self._begin(scheduler_output)

    def _begin(self, scheduler_output: SchedulerOutput) -> None:
        metadata = scheduler_output.kv_connector_metadata
        assert metadata is not None, "the scheduler has a connector, too"
        # the blocks of preempted requests may be written in this step
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self._finished_requests = scheduler_output.finished_req_ids
        self._has_tokens = has_tokens = bool(scheduler_output.total_num_scheduled_tokens)
        with self._context(has_tokens):
            # before the forward, even if it could come later: its threads copy while the device computes
            self.connector.start_load_kv(get_forward_context())
            if has_tokens and not self.in_layers:
                self._each_layer(lambda name, _: self.connector.wait_for_layer_load(name))

    def computed(self) -> None:
        """Saves the step's blocks, once all kernels of the step that read or write the cache are launched."""
        with self.work.clock():
            self._computed()

    def _computed(self) -> None:
        self.connector.finish_forward()
        if not self.in_layers:
            metadata = StepAttention()
            with self._context(has_tokens=True):
                self._each_layer(lambda name, cache: self._save_layer(name, cache, metadata))

    def _save_layer(self, name: str, cache: LayerCache, metadata: AttentionMetadata) -> None:
        self.connector.save_kv_layer(name, cache, metadata)  # type: ignore[arg-type]  # as registered

    def finish(self, *, rests: bool = True) -> KVConnectorOutput:
        """Ends the step, and returns the report for the scheduler. rests: whether a step without tokens may take time,
        because no other step is in flight.
        """
        if rests and not self._has_tokens:
            self._rest()
        with self.work.clock():
            return self._finish()

    def _finish(self) -> KVConnectorOutput:
        connector, failed = self.connector, set[int]()
        if self._ours is not None and self._ours is not connector:
            # another child's loads within this step have failed: the step has computed with missing blocks, on all
            # ranks if they are missing on one
            failed = connector.get_block_ids_with_load_errors()
            has_failed = not self._ranks.all_of(not failed)
            if has_failed or self._follows_failure:
                self._ours.worker.leave_out_saves()
            # the next step may already be planned, and read the same blocks
            self._follows_failure = has_failed and self._ahead
        connector.wait_for_save()
        found = connector.get_transfer_results(self._finished_requests)
        output = KVConnectorOutput(
            finished_sending=found.finished_sending,
            finished_recving=found.finished_recving,
            failed_recving=found.failed_recving,
            # after the results: blocks of a finished load are reported in the same step
            invalid_block_ids=failed | connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def _rest(self) -> None:
        """Waits for loads. If every request waits for blocks, the engine calls this again and again, and takes Python's
        lock from the loading threads: stored prompts waited more than twice as long for their first token.
        """
        if self._ours is not None:
            self._ours.worker.loads.wait(REST_SECONDS)

    def loaded_blocks(self, scheduler_output: SchedulerOutput) -> NDArray[np.int64]:
        """Returns the blocks whose keys and values this worker does not compute, and maybe others, once the step has
        begun. The result depends only on the step's message, so it is the same on all ranks.

        The plugin's own connector names the blocks of the loads that the message orders; their requests run later. For
        other connectors it is only known that they are among the computed blocks of requests that begin or resume.
        """
        named = set() if self._ours is None else self._ours.worker.loads.take_ordered()
        if self._ours is self.connector:
            return np.fromiter(named, np.int64)
        cached = scheduler_output.scheduled_cached_reqs
        begun = [(new.num_computed_tokens, new.block_ids[0]) for new in scheduler_output.scheduled_new_reqs]
        begun += [
            (cached.num_computed_tokens[index], blocks[0])
            for index, request_id in enumerate(cached.req_ids)
            if request_id in cached.resumed_req_ids and (blocks := cached.new_block_ids[index]) is not None
        ]
        found = [block for computed, blocks in begun for block in blocks[: computed // self._block_size]]
        return np.fromiter(named.union(found), np.int64)

    def take_summarised_blocks(self) -> NDArray[np.int64]:
        """Returns the `loaded_blocks` whose summaries are loaded, too; only the plugin's own connector has any."""
        return np.fromiter(set() if self._ours is None else self._ours.worker.loads.take_summarised(), np.int64)

    def stored_copies(self, selection: BlockSelection, options: BlockOptions) -> StoredCopies | None:
        """Returns the object that loads blocks which the plugin's own connector keeps in its store with KV offload;
        None if it keeps none.

        selection, options: choices and options of the method that chooses blocks.
        """
        return None if self._ours is None else self._ours.stored_copies(selection, options)

    def close(self) -> None:
        """Ends its threads; a second call has no effect."""
        if self.in_layers:
            ensure_kv_transfer_shutdown()
        elif self._caches:
            self.connector.shutdown()
        self._caches = {}

    def _context(self, has_tokens: bool) -> AbstractContextManager[Any]:
        """Returns the forward context for connectors; its metadata is None without tokens, which connectors check."""
        metadata = dict.fromkeys(self._caches, StepAttention()) if has_tokens else None
        return set_forward_context(metadata, self._vllm_config, slot_mapping={})

    def _each_layer(self, act: Callable[[str, LayerCache], None]) -> None:
        for name, cache in self._caches.items():
            act(name, cache)
