"""Steps that do not fit the memory of the device are divided: by shared blocks first, then by tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.engine_shapes import config_of
from vllm_gaudi_ucm.decisions.step_memory import GIB, StepMemory, step_bytes
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, ModelSpec
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, default_shared_blocks
from vllm_gaudi_ucm.ops.chosen_tokens.score_memory import choice_bytes

BLOCK = 128


def limits(rows: int, length: int, shared: int | None = None) -> Limits:
    return Limits(rows, 64, length, BLOCK, 4096, contiguous=False, max_shared_blocks=shared)


def largest(found: Limits) -> int:
    """Bytes of prompts beside the most shared blocks."""
    shape = ForwardShape.from_sizes(True, found.max_num_batched_tokens, found.most_shared_blocks, 0)
    return step_bytes(shape, LLAMA_8B, BLOCK)


def test_what_fits_stays() -> None:
    given = limits(2048, 8192, default_shared_blocks(8192, BLOCK))
    memory = StepMemory(LLAMA_8B, 8.0)
    assert memory.bound(given) == given
    assert memory.rows(2048, 64, 8192) == 2048


def test_fewer_shared_blocks_but_those_of_a_request() -> None:
    given = limits(2048, 32768, default_shared_blocks(32768, BLOCK))
    memory = StepMemory(LLAMA_8B, 8.0)
    found = memory.bound(given)
    assert 32768 // BLOCK <= found.most_shared_blocks < given.most_shared_blocks
    assert largest(found) <= 8 * GIB < largest(given)
    assert StepMemory(LLAMA_8B, 0.1).bound(given).most_shared_blocks == 32768 // BLOCK


@pytest.mark.parametrize(("length", "most"), [(131072, 2048), (131072, 8192), (8192, 8192)])
def test_fewer_tokens_where_one_request_does_not_fit(length: int, most: int) -> None:
    memory = StepMemory(LLAMA_8B, 8.0)
    rows = memory.rows(most, 64, length)
    shape = ForwardShape.from_sizes(True, rows, -(-length // BLOCK), 0)
    assert 64 <= rows < most
    assert step_bytes(shape, LLAMA_8B, BLOCK) <= 8 * GIB


def test_scores_of_chosen_tokens_are_counted_and_have_a_bound() -> None:
    """A GiB and the gathered keys of the indexer, however many tokens a row sees (up to 16 million scores of a row)."""
    model = ModelSpec.from_hf_config(config_of("v3.2"))
    assert model.kv_bytes_per_token == 4 * (576 + 128) * 2
    assert model.shard(8).kv_bytes_per_token == model.kv_bytes_per_token
    shared = {"index_topk_pattern": "FSSS"}, {"indexer_types": ["full", "shared", "full", "full"]}
    shared += ({"index_topk_freq": 2, "index_skip_topk_offset": 1},)
    assert [ModelSpec.from_hf_config(config_of("v3.2") | one).latent.indexers for one in shared] == [1, 3, 2]
    dense = replace(model, latent=replace(model.latent, chosen=0))
    for blocks, same in ((16, True), (17, False), (8 * 1024, False)):
        decode = ForwardShape.from_sizes(False, 8, 0, blocks)
        assert (step_bytes(decode, dense, BLOCK) == step_bytes(decode, model, BLOCK)) is same
    prompt = ForwardShape.from_sizes(True, 2048, 1024, 0)
    assert step_bytes(prompt, model, BLOCK) < 2 * GIB < step_bytes(prompt, dense, BLOCK)
    for tokens in (131072, 1 << 20, 1 << 23):
        assert choice_bytes(2048, tokens, 0, 256) <= GIB + tokens * 264


def test_where_nothing_fits_steps_are_as_small_as_may_be() -> None:
    memory = StepMemory(LLAMA_8B, 8.0)
    assert memory.rows(2048, 256, 1 << 20) == 256
    assert memory.rows(200, 256, 1 << 20) == 200
    assert memory.gib_of(256, 1 << 20) > 8


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300, 2048])
def test_rows_are_never_more_than_asked(rows: int) -> None:
    assert StepMemory(LLAMA_8B, 8.0).rows(rows, 1, 4096) == rows
