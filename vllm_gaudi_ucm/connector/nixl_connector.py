"""vLLM's NixlConnector for keys and values in separate tensors: one engine computes prompts, another one reads their
blocks from its memory and decodes.

vLLM registers one tensor for each layer, with keys and values next to each other in every head. Here keys and values
are two regions with names of their own, so both engines need this plugin.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.device_blocks import copy_each
from vllm_gaudi_ucm.kv_cache.pair import in_blocks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorRole
from vllm_gaudi_ucm.vllm_api.nixl import NixlPullConnector, NixlPullConnectorWorker, ReqMeta, describe_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig
    from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorHandshakeMetadata

logger = plugin_logger(__name__)


class PairWorker(NixlPullConnectorWorker):
    """The worker's side: two regions of memory for each layer, of the device or, on a Gaudi, of buffers on the host."""

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:  # type: ignore[override]
        parts = {name: [f"{name}.{part}" for part in cache._fields] for name, cache in kv_caches.items()}
        describe_parts(self, self.kv_cache_config, parts)
        regions: dict[str, torch.Tensor] = {}
        for name, cache in kv_caches.items():
            blocks = in_blocks(cache, self.block_size)
            regions.update(zip(parts[name], map(_by_head, blocks), strict=True))
        super().register_kv_caches(regions)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        """Fails the request alone whose blocks do not fit the other engine's: its client names them, and vLLM asserts
        that they are right.
        """
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:
            logger.warning(
                "The blocks of request %s cannot be read: its kv_transfer_params do not fit the other engine (%s: %s)",
                req_id,
                type(error).__name__,
                error,
            )
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)


class NixlConnector(NixlPullConnector):
    """The connector under vLLM's name, by which other parts of vLLM look it up."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes a connector because of it"
        if transfer.kv_buffer_device == "hpu":
            # vLLM's default is the device, whose memory NIXL is not known to register
            transfer.kv_buffer_device = "cpu"
        if role == KVConnectorRole.SCHEDULER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        # not by NixlPullConnector, which would make a worker and an agent of its own
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        self.connector_worker = PairWorker(vllm_config, self.engine_id, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns None: rows of tokens, the only layout here, are as good a region as any."""
        return None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Starts to answer handshakes. Raises RuntimeError if the port is in use: vLLM would wait for ever."""
        assert self.connector_scheduler is not None
        host, port = self.connector_scheduler.side_channel_host, self.connector_scheduler.side_channel_port
        try:
            with socket.create_server((host, port)):
                pass
        except OSError as error:
            raise RuntimeError(
                f"NixlConnector cannot listen on {host}:{port} ({error}); "
                "set VLLM_NIXL_SIDE_CHANNEL_PORT to a free port, another one for each engine of a machine"
            ) from error
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def set_host_xfer_buffer_ops(self, copy_operation: object) -> None:
        """Ignores the runner's copies, which take pairs: the host's buffers are the regions of PairWorker."""
        worker = self.connector_worker
        assert worker is not None
        copy = partial(copy_regions, get_device(current_platform.device_type))
        worker.set_host_xfer_buffer_ops(copy)
        if worker.use_host_buffer:
            # a Gaudi then has compiled the copies before requests come
            device, host = worker.device_kv_caches, worker.host_xfer_buffers
            copy(device, host, [DUMMY_BLOCK], [DUMMY_BLOCK], "d2h")
            copy(host, device, [DUMMY_BLOCK], [DUMMY_BLOCK], "h2d")


def _by_head(blocks: torch.Tensor) -> torch.Tensor:
    """Returns vLLM's view of blocks, [blocks, kv heads, block size, head size], or the reverse of it."""
    return blocks.transpose(1, 2)


def copy_regions(
    device: Device,
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    direction: str,
) -> None:
    """Copies blocks between the regions of the device and of the host, in either direction.

    sources, targets: regions by name, [blocks, kv heads, block size, head size].
    """
    pairs = torch.tensor([source_ids, target_ids], dtype=torch.int64).T
    copy_each(device, [*map(_by_head, sources.values())], [_by_head(targets[name]) for name in sources], pairs)
