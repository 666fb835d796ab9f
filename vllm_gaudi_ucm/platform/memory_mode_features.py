"""Refuses, when an engine starts, what memory mode cannot run beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.options import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.connector.transfer_config import OURS
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.unsupported import UnsupportedFeatureError
from vllm_gaudi_ucm.store.options import FileStoreOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions

_MODE = "with ucm.memory_mode"


def refuse_beside_memory_mode(vllm_config: VllmConfig, options: MemoryModeOptions) -> None:
    """Raises UnsupportedFeatureError for what reads block tables and does not know of blocks that are away: a KV
    connector that is not ours, and a draft model, whose layers share the tables.

    Raises UcmConfigError for copies in the folder of the connector, which either would fill up to its own capacity.
    """
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if transfer is not None:
        _check_connector(transfer, options)
    if speculation is not None and speculation.method == "draft_model":
        raise UnsupportedFeatureError(f"a draft model {_MODE}", "--speculative-config")


def _check_connector(transfer: KVTransferConfig, options: MemoryModeOptions) -> None:
    if transfer.kv_connector != OURS:
        # vLLM names that of the flag later
        asked_by = "--kv-transfer-config" if transfer.kv_connector else "--kv-offloading-size"
        name = transfer.kv_connector or "OffloadingConnector"
        raise UnsupportedFeatureError(f"the KV connector {name} {_MODE}", asked_by)
    store = ConnectorOptions.resolve(transfer.kv_connector_extra_config, EXTRA_CONFIG).store
    both = (store, options.store)
    paths = [one.path.resolve() for one in both if isinstance(one, FileStoreOptions)]
    if len(paths) == 2 and paths[0] == paths[1]:
        wanted = f"another folder than that of {EXTRA_CONFIG}.store"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", str(paths[1]), wanted)])
