"""Other KV connectors than ours: through the attention layers at true shapes, around graphs at static ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.engine import pair_connector
from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES, offloading
from tests.engine.serving import Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines


def example(folder: Path) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PairConnector",
        kv_connector_module_path=pair_connector.__name__,
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )


@SHAPES
def test_a_connector_that_works_layer_by_layer(tiny_llama: Path, tmp_path: Path, ucm: dict[str, Any]) -> None:
    """It saves each layer after its attention and loads before the step that needs it."""
    with Engine(tiny_llama, ucm, **OPTIONS) as engine:
        expected = engine.alone(PROMPTS, 12)
    hits = []
    for _ in range(2):
        with Engine(tiny_llama, ucm, kv_transfer_config=example(tmp_path), **OPTIONS) as engine:
            found = engine.alone(PROMPTS, 12)
            assert_same(found, expected)
            hits.append([answer.cached_tokens for answer in found])
            engine.check_idle()
    # whole blocks, and never the last token
    assert hits == [[0] * len(PROMPTS), [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]]


@SHAPES
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_offloaded_blocks_come_back(tiny_llama: Path, ucm: dict[str, Any], blocks_per_chunk: int) -> None:
    """vLLM's OffloadingConnector over swap_blocks; a cache too small for all prompts evicts what it then loads."""
    with Engine(tiny_llama, ucm, **OPTIONS) as engine:
        expected = engine.alone(PROMPTS, 12)
    config = offloading(block_size=16 * blocks_per_chunk)
    # one prompt fits, two do not
    with Engine(tiny_llama, ucm, kv_transfer_config=config, num_gpu_blocks_override=17, **OPTIONS) as engine:
        first = engine.alone(PROMPTS, 12)
        assert_same(first, expected)
        again = engine.alone(PROMPTS, 12)
        assert_same(again, expected)
        for _ in range(3):
            engine.step()
        engine.check_idle()
    assert sum(answer.cached_tokens for answer in first) == 0
    assert again[3].cached_tokens >= 128
