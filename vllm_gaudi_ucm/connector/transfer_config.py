"""What `--kv-transfer-config` gets where it leaves something to the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.options import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = plugin_logger(__name__)

OURS = "UcmConnector"
_OFFLOADING = {"spec_name": "UcmOffloadingSpec", "spec_module_path": "vllm_gaudi_ucm.connector.offloading_spec"}


def loads_partly(vllm_config: VllmConfig) -> bool:
    """Whether our connector is on and may leave blocks in its store, where there is memory mode."""
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector != OURS or not config.is_kv_consumer:
        return False
    return ConnectorOptions.resolve(config.kv_connector_extra_config, EXTRA_CONFIG).loads_partly


def complete_transfer_config(vllm_config: VllmConfig) -> None:
    """Checks the options of our connector, and gives vLLM's offloading connector copies that run on our devices.

    Raises UcmConfigError for options that cannot be used.
    """
    if vllm_config.kv_transfer_config is None and vllm_config.cache_config.kv_offloading_size is not None:
        from vllm.config import KVTransferConfig

        # vLLM names the connector of --kv-offloading-size in this once the platform has seen the configuration
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector_extra_config=dict(_OFFLOADING))
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    extra = config.kv_connector_extra_config
    if config.kv_connector == OURS:
        policy = ConnectorOptions.resolve(extra, EXTRA_CONFIG).load_failure
        if config.kv_load_failure_policy != policy:
            logger.info("kv_load_failure_policy is %r: the option load_failure of %s says so", policy, OURS)
            config.kv_load_failure_policy = policy
    elif config.kv_connector == "OffloadingConnector" and "spec_name" not in extra:
        extra.update(_OFFLOADING)
