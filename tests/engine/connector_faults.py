"""Helpers of `test_connector_faults.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig

LOAD_DEADLINE, LOOKUP_DEADLINE = 0.4, 0.3


def transfer(**options: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": {"kind": "memory"},
            # a block that is kept in host memory would be loaded whatever the store does
            "prefetch": {"prefetch_cache_size": 1},
            "load_deadline": LOAD_DEADLINE,
            "lookup_deadline": LOOKUP_DEADLINE,
            **options,
        },
    )
