"""A KV cache in bfloat16 under a float32 model, by the name that the installed vLLM has for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.serving import Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.vllm_api.cache_options import float_kv_dtype

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 3, 90))]
# a decode reads its whole context from the cache, in numbers of eight bits
NEAR = 0.05


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_half_the_bytes_and_nearly_the_same_logprobs(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / family, make_config(family))
    with Engine(model, kv_cache_memory_bytes=2 << 20) as engine:
        exact, wide = engine.greedy(PROMPTS, 8), engine.cached_blocks()[0]
    with Engine(model, kv_cache_dtype=float_kv_dtype("bfloat16"), kv_cache_memory_bytes=2 << 20) as engine:
        found, narrow = engine.greedy(PROMPTS, 8), engine.cached_blocks()[0]
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert len(narrow) >= 2 * len(wide) - 2
    for one, other in zip(found, exact, strict=True):
        same = next((i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]), 8)
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=NEAR)
        assert one.tokens[0] == other.tokens[0]
