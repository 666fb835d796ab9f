"""Helpers of `test_multi_connector.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from tests.engine.connector import file_store
from tests.engine.pair_connector import PairConnector


def ours(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": file_store(folder), **options},
    }


def offloading() -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": 64 << 20, "offload_prompt_only": False, "block_size": 16}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def shared(folder: Path, connector: type[PairConnector] = PairConnector) -> dict[str, Any]:
    """Children that load within the step that needs the blocks."""
    return {
        "kv_connector": connector.__name__,
        "kv_connector_module_path": connector.__module__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "shared")},
    }


def multi(*children: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": list(children)}
    )
