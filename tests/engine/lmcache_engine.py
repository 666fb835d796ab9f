"""Helpers of `test_lmcache.py`: LMCache's options, which it reads once in a process."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig


def lmcache(**options: Any) -> dict[str, Any]:
    """A connector with 32 tokens in a chunk and 64 MB of memory. options: LMCache's own."""
    found = {"chunk_size": 32, "max_local_cpu_size": 0.0625, **options}
    extra = {f"lmcache.{name}": value for name, value in found.items()}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def alone(**options: Any) -> KVTransferConfig:
    return KVTransferConfig(**lmcache(**options))


def forget_options(patch: pytest.MonkeyPatch) -> None:
    """The next engine reads LMCache's options anew, also if an earlier one has not closed; usage is not reported."""
    from lmcache.integration.vllm import utils
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    patch.setenv("LMCACHE_TRACK_USAGE", "false")
    patch.setattr(utils, "_config_instance", None)
    patch.setattr(LMCacheEngineBuilder, "_instances", {})
