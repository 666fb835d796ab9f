"""The connector that vLLM makes twice, for its scheduler and for the worker: each method belongs to one of the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_gaudi_ucm.connector.metadata import UcmMetadata, UcmWorkerMetadata
from vllm_gaudi_ucm.connector.scheduler_side import SchedulerSide
from vllm_gaudi_ucm.connector.setup import ConnectorSetup
from vllm_gaudi_ucm.connector.worker_side import WorkerSide
from vllm_gaudi_ucm.vllm_api.kv_transfer import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    MultiConnector,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.connector.group_keys import Tables
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.memory_mode.scheduler_side import OffloadScheduler
    from vllm_gaudi_ucm.memory_mode.worker_side import StoredCopies
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig
    from vllm_gaudi_ucm.vllm_api.model import ForwardContext
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlocks
    from vllm_gaudi_ucm.vllm_api.steps import KVConnectorOutput, Request, SchedulerOutput


class UcmConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads asynchronously: a request whose prefix is stored waits for its blocks while others run.

    See vLLM's KVConnectorBase_V1 for the contract of each method.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = ConnectorSetup.from_config(vllm_config, kv_cache_config)
        self._caches: dict[str, LayerCache] = {}
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        # with KV offload our scheduler and our runner open the sides, once the objects that they need exist
        if role == KVConnectorRole.SCHEDULER and not self._setup.offloads:
            self.open_scheduler_side()

    @property
    def requires_kv_delivery(self) -> bool:
        # a cache: blocks that are not saved are computed again
        return False

    def _block_tables(self, request_id: str) -> Tables:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        tables: Tables = self._kv_cache_manager.get_block_ids(request_id)
        return tables

    def _cached_tokens(self, request: Request) -> int:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        return self._kv_cache_manager.get_computed_blocks(request)[1]

    @property
    def scheduler(self) -> SchedulerSide:
        """The opened side of the scheduler, which our scheduler calls, too."""
        assert self.scheduler_side is not None, "called in the worker, or with KV offload before it is opened"
        return self.scheduler_side

    @property
    def worker(self) -> WorkerSide:
        """The opened side of the worker, which our runner calls, too; other connectors lack it."""
        assert self.worker_side is not None, "called in the scheduler, or before the cache is registered"
        return self.worker_side

    # methods of the scheduler

    def open_scheduler_side(self, offload: OffloadScheduler | None = None) -> None:
        """Opens the scheduler's side; called once, by our scheduler with KV offload, otherwise here."""
        self.scheduler_side = SchedulerSide(self._setup, self._block_tables, self._cached_tokens, offload)

    def on_new_request(self, request: Request) -> None:
        self.scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self.scheduler.matched_tokens(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.scheduler.admitted(request, blocks.get_block_ids(), num_external_tokens)
        else:
            self.scheduler.runs(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, UcmWorkerMetadata):
            report = UcmWorkerMetadata()
        self.scheduler.lost(connector_output.invalid_block_ids, report.late)
        self.scheduler.failed(connector_output.failed_recving or set())
        self.scheduler.loaded(connector_output.finished_recving or set())
        self.scheduler.unsaved(report.unsaved)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # blocks are copied in the step that fills them, so they are not needed any more; vLLM itself keeps the blocks
        # of a load until the worker reports its end
        self.scheduler.end(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool | None:
        return self.scheduler.clear()

    # methods of the worker

    def stored_copies(self, selection: BlockSelection, options: BlockOptions) -> StoredCopies | None:
        """Opens the worker's side with KV offload; called once by our runner, after `register_kv_caches`."""
        self.worker_side = WorkerSide(self._setup, self._caches, selection, options)
        return self.worker_side.stored_copies()

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:  # type: ignore[override]  # our runner's
        self._caches = kv_caches
        if not self._setup.offloads:
            self.worker_side = WorkerSide(self._setup, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests run once all their blocks have been loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved as a whole, after the step."""

    def wait_for_save(self) -> None:
        self.worker.save(self._metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = self.worker.loads.finished(finished_req_ids)
        return KVConnectorTransferResults(set(), finished, self.worker.loads.take_failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.loads.take_invalid()

    def build_connector_worker_meta(self) -> UcmWorkerMetadata | None:
        return self.worker.report()

    def shutdown(self) -> None:
        for side in (self.worker_side, self.scheduler_side):
            if side is not None:
                side.close()

    def _metadata(self) -> UcmMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, UcmMetadata), "made by build_connector_meta"
        return metadata


def our_connector(connector: object) -> UcmConnector | None:
    """Returns our connector: the connector itself, or a child of vLLM's MultiConnector."""
    if isinstance(connector, UcmConnector):
        return connector
    children = connector.sub_connectors if isinstance(connector, MultiConnector) else []
    return next((found for child in children if (found := our_connector(child)) is not None), None)
