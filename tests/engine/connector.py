"""Helpers of `test_connector.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

GSA = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


def transfer(store: dict[str, Any], **options: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": store, **options},
    )


def file_store(folder: Path) -> dict[str, Any]:
    return {"kind": "file", "path": str(folder / "blocks"), "fsync": False, "deadline": 10.0}


def gsa(ratio: float) -> dict[str, Any]:
    return {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**GSA, "sparse_ratio": ratio}}}
