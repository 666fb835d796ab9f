"""Helpers of `test_any_connector.py` that other tests use, too."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.engine.tiny_models import VOCAB

RNG = random.Random(11)


PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (5, 34, 70, 165, 48)]


STATIC = {"graphs": {"mode": "eager", "max_graphs": 8, "warm_up": "full"}}


OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


SHAPES = pytest.mark.parametrize("ucm", [{}, STATIC], ids=["true shapes", "static"])


def offloading(**options: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 64 << 20, "offload_prompt_only": False, **options},
    )
