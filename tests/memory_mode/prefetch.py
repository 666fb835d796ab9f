"""Helpers of `test_prefetch.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ucm.config.ucm_config import resolve_config


def config_of(method: str = "GSA", store: Any = None, moves: int = 8, **options: Any) -> Any:
    mode = {"enabled": True, "moves_per_step": moves, "store": store}
    return resolve_config(
        {"ucm": {"ucm_sparse_method": method, "ucm_sparse_config": {"GSA": options}, "memory_mode": mode}}
    )
