"""Options of ours that exclude something of vLLM's: each is refused by name when the engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, OURS, ConnectorOptions
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.store.file import FileStoreOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions

_MODE = "with ucm.memory_mode"


def refuse_without_prefix_cache(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for `partial_hits` where nothing is kept that could be hit."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedFeatureError("ucm.kv_cache.partial_hits without a prefix cache", "--no-enable-prefix-caching")


def refuse_beside_swaps(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for a KV connector: which blocks a resumed request gets is its decision, too, and
    with a store in host memory it has a copy of them already."""
    _refuse_connector(vllm_config, "with ucm.preemption.mode swap or auto")


def refuse_beside_compaction(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for a KV connector: it keeps ids of blocks that it reads and writes on its own."""
    _refuse_connector(vllm_config, "with ucm.kv_cache.compaction")


def _refuse_connector(vllm_config: VllmConfig, beside: str) -> None:
    transfer, offloaded = vllm_config.kv_transfer_config, vllm_config.cache_config.kv_offloading_size
    if transfer is not None or offloaded is not None:
        raise UnsupportedFeatureError(f"a KV connector {beside}", _asked_by(transfer))


def _asked_by(transfer: KVTransferConfig | None) -> str:
    """The flag that asks for a connector; vLLM sets that of the second one later."""
    return "--kv-transfer-config" if transfer is not None and transfer.kv_connector else "--kv-offloading-size"


def refuse_beside_memory_mode(vllm_config: VllmConfig, options: MemoryModeOptions) -> None:
    """Raises UnsupportedFeatureError for what reads block tables and does not know of offloaded blocks: a KV connector
    that is not ours, and a draft model, whose layers share the tables.

    Raises UcmConfigError for copies in the connector's folder, which each would fill up to its own capacity.
    """
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if transfer is not None:
        _check_connector(transfer, options)
    if speculation is not None and speculation.method == "draft_model":
        raise UnsupportedFeatureError(f"a draft model {_MODE}", "--speculative-config")


def _check_connector(transfer: KVTransferConfig, options: MemoryModeOptions) -> None:
    if transfer.kv_connector != OURS:
        name = transfer.kv_connector or "OffloadingConnector"
        raise UnsupportedFeatureError(f"the KV connector {name} {_MODE}", _asked_by(transfer))
    store = ConnectorOptions.resolve(transfer.kv_connector_extra_config, EXTRA_CONFIG).store
    both = (store, options.store)
    paths = [one.path.resolve() for one in both if isinstance(one, FileStoreOptions)]
    if len(paths) == 2 and paths[0] == paths[1]:
        wanted = f"another folder than that of {EXTRA_CONFIG}.store"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", str(paths[1]), wanted)])
