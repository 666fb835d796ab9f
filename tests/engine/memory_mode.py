"""Helpers of `test_memory_mode.py` that other tests use, too."""

from __future__ import annotations

import math
from typing import Any

from vllm import RequestOutput

from tests.engine.serving import Engine
from tests.engine.sparse import STATIC
from vllm_gaudi_ucm.memory_mode.copies import CopyStore

WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


def ucm(method: str = "GSA", static: bool = False, ratio: float = 0.2, **mode: Any) -> dict[str, Any]:
    options = {
        "enabled": True,
        "on_device_ratio": 0.4,
        "refresh_steps": 3,
        "history_decay": 0.0,
        "max_missed": 1.0,
        **mode,
    }
    config: dict[str, Any] = {
        "ucm_sparse_method": method,
        "ucm_sparse_config": {method: {**WINDOWS, "sparse_ratio": ratio}},
        "memory_mode": options,
    }
    return {**config, "graphs": STATIC} if static else config


def generated(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_finite(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        for entry in completion.logprobs:
            assert all(math.isfinite(value.logprob) for value in entry.values())


def copies_of(engine: Engine) -> CopyStore:
    sparse = engine.runner.parts.sparse
    assert sparse is not None
    assert sparse.offload is not None
    return sparse.offload._copies
