"""Helpers of `test_connector_ranks.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from vllm_gaudi_ucm.connector.connector import our_connector


def transfer(folder: Path, **store: Any) -> KVTransferConfig:
    in_files = {"kind": "file", "path": str(folder / "blocks"), "fsync": False}
    return KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": {**(store or in_files), "deadline": 20.0},
            # a block that is kept in host memory would be loaded whatever the store has
            "prefetch": {"prefetch_cache_size": 1},
            "lookup_deadline": 20.0,
            "load_deadline": 60.0,
            "save_patience": 0,
        },
    )


def spoil(path: Path) -> None:
    """Changes a byte of the block, which its checksum tells."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def failed_blocks(worker: Any) -> int:
    """Of a worker: those that it could not load."""
    ours = our_connector(worker.model_runner.transfer.connector)
    assert ours is not None
    assert ours.worker_side is not None
    return ours.worker_side.loads.counts.failed_blocks


def ours(folder: Path) -> dict[str, Any]:
    """As the child of another connector."""
    return {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": transfer(folder).kv_connector_extra_config,
    }
