"""vLLM's LMCacheConnectorV1 for keys and values in separate tensors, with copies that run on our devices.

LMCache's own copies take one tensor for each layer, and none of them runs on a CPU. Its engine is made here with copies
of pairs; memory, disks, servers, look-ups and keys are LMCache's.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.utils import ENGINE_NAME, lmcache_get_or_create_config
from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from vllm.platforms import current_platform

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.device_blocks import copy_each
from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.distributed import get_tp_group
from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorRole
from vllm_gaudi_ucm.vllm_api.lmcache import VllmLMCacheConnector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)

CLOSING_SECONDS = 5
_OPTION = "lmcache."
_UNSUPPORTED = {
    "use_layerwise": "its copies are made layer by layer inside vLLM's attention; blocks are copied between steps here",
    "enable_blending": "it computes with tensors of vLLM's attention",
    "enable_pd": "it registers one tensor for each layer; take NixlConnector",
    "save_unfull_chunk": "a chunk is a number of whole blocks here",
}
"""Options of LMCache that need more than copies of whole blocks, and why."""


class PairCopies(GPUConnectorInterface):
    """Copies chunks of tokens between LMCache's memory, [2, layers, tokens, kv heads * head size], and pairs.

    A chunk is a number of whole blocks. The arguments `kvcaches` and `slot_mapping` are the pairs of all layers and the
    slots of all tokens of the request, int64 on the host.
    """

    def __init__(self, block_size: int, device: Device) -> None:
        self._block_size = block_size
        self._device = device

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self._copy(memory_obj.tensor, kwargs["kvcaches"], kwargs["slot_mapping"][start:end], to_host=True)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self._copy(memory_obj.tensor, kwargs["kvcaches"], kwargs["slot_mapping"][start:end], to_host=False)

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[Any] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        for memory, start, end in zip(memory_objs or (), starts or (), ends or (), strict=True):
            self.to_gpu(memory, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """LMCache calls this for copies layer by layer, which are refused."""
        raise NotImplementedError("copies of single layers")

    def warm_up(self, pairs: Sequence[KvPair]) -> None:
        """Copies the dummy block to the host and back: a Gaudi then has compiled the copies before requests come."""
        key = in_blocks(pairs[0], self._block_size).key
        block = torch.empty((2, len(pairs), self._block_size, key[0, 0].numel()), dtype=key.dtype)
        slots = DUMMY_BLOCK * self._block_size + torch.arange(self._block_size)
        self._copy(block, pairs, slots, to_host=True)
        self._copy(block, pairs, slots, to_host=False)

    def _copy(self, chunk: torch.Tensor, pairs: Sequence[KvPair], slots: torch.Tensor, *, to_host: bool) -> None:
        caches = [in_blocks(pair, self._block_size)[part] for part in (0, 1) for pair in pairs]
        blocks = slots[:: self._block_size] // self._block_size
        shape = (len(blocks), *caches[0].shape[1:])
        host = [rows.view(caches[0].dtype).view(shape) for part in chunk for rows in part]
        both = torch.stack([blocks, torch.arange(len(blocks))], 1)
        if to_host:
            copy_each(self._device, caches, host, both)
        else:
            copy_each(self._device, host, caches, both.flip(1))


class LMCacheConnectorV1(VllmLMCacheConnector):
    """The connector under vLLM's name, by which other parts of vLLM look it up."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if role == KVConnectorRole.WORKER:
            _open_engine(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        # slots are read on the host, where the copies find their blocks; the adapter would move them to the device
        self._adapter.device = torch.device("cpu")

    @property
    def _adapter(self) -> Any:
        """LMCache's adapter; vLLM declares the type of an older one."""
        return self._lmcache_engine

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:  # type: ignore[override]
        shapes = {tensor.shape for cache in kv_caches.values() for tensor in cache}
        if len(shapes) > 1:
            raise UnsupportedFeatureError(
                f"LMCache with layers of different sizes (found {sorted(map(tuple, shapes))}; take UcmConnector)",
                "--kv-transfer-config",
            )
        super().register_kv_caches(dict(kv_caches))  # type: ignore[arg-type]  # as registered by our runner
        engine = self._adapter._manager.lmcache_engine
        engine.gpu_connector.warm_up(list(kv_caches.values()))

    def on_new_request(self, request: Request) -> None:
        """Keeps blocks of different cache salts apart: LMCache's keys do not contain the salt, but tags."""
        params = request.sampling_params
        if request.cache_salt and params is not None:
            extra = params.extra_args or {}
            tag = {"lmcache.tag.cache_salt": hashlib.sha256(request.cache_salt.encode()).hexdigest()}
            params.extra_args = {**extra, "kv_transfer_params": {**(extra.get("kv_transfer_params") or {}), **tag}}

    def shutdown(self) -> None:
        """Closes LMCache's memory, disks and connections, which vLLM's connector leaves to the end of the process.

        Reason: LMCache's own shutdown closes the socket of its offload server while a thread receives from it, and
        libzmq then aborts the process; the one of its look-up client ends all sockets of vLLM. Both are left open.
        Remove when: `ZMQOffloadServer.close` wakes its thread first, and the client has a context of its own.
        """
        manager = self._adapter._manager
        for part, end in ((manager.health_monitor, "stop"), (manager.lookup_server, "close")):
            if part is not None:
                getattr(part, end)()
        if manager.lmcache_engine is not None:
            # its client of a server that does not answer closes never
            closing = threading.Thread(target=LMCacheEngineBuilder.destroy, args=(ENGINE_NAME,), daemon=True)
            closing.start()
            closing.join(CLOSING_SECONDS)
            if closing.is_alive():
                logger.warning("LMCache has not closed its stores in %d s; they end with the process", CLOSING_SECONDS)


def _open_engine(vllm_config: VllmConfig) -> None:
    """Makes LMCache's engine of this process, which its adapter then finds by its name.

    Raises UcmConfigError for options of LMCache that need more than copies of whole blocks.
    """
    config, transfer = lmcache_get_or_create_config(), vllm_config.kv_transfer_config
    assert transfer is not None, "vLLM makes a connector because of it"
    extra = transfer.kv_connector_extra_config
    for name, value in extra.items():
        if name.startswith(_OPTION):
            validate_and_set_config_value(config, name.removeprefix(_OPTION), value)
    block_size = vllm_config.cache_config.block_size
    problems = [
        Problem(f"{_OPTION}{name}", "true", f"false, because {why}")
        for name, why in _UNSUPPORTED.items()
        if getattr(config, name)
    ]
    if config.chunk_size % block_size:
        expected = f"a multiple of the block size, {block_size}"
        problems.append(Problem(f"{_OPTION}chunk_size", str(config.chunk_size), expected))
    if problems:
        raise UcmConfigError(problems)
    metadata = VllmServiceFactory(config, vllm_config, "worker").get_or_create_metadata()
    ranks, copies = get_tp_group(), PairCopies(block_size, get_device(current_platform.device_type))
    LMCacheEngineBuilder.get_or_create(ENGINE_NAME, config, metadata, copies, ranks.broadcast, ranks.broadcast_object)
