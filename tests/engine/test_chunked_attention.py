"""Llama 4, whose layers see their own chunk alone or everything, gives the tokens of Transformers.

Every block holds NaN until a request writes it, the null block included, which stands for blocks of earlier chunks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.chunked_attention import TUNED
from tests.engine.kv_groups import engine
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import VOCAB, make_model
from tests.engine.window_models import LLAMA4, window_config
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

CHUNK = LLAMA4["attention_chunk_size"]
TOKENS = 48
RNG = random.Random(5)
# shorter than a chunk, its last and its first token, several chunks
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(length)] for length in (1, 150, CHUNK - 1, CHUNK, 130)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), window_config("llama4_text"))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def serve(model: Path, mode: str = "off", **options: Any) -> Engine:
    return engine(model, mode, **TUNED, **options)


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_tokens_of_transformers(model: Path, reference: ReferenceModel, mode: str) -> None:
    """Prompts in chunks beside decodes, then with prefix hits, which need the blocks of the last chunk."""
    with serve(model, mode) as serving:
        kind = type(serving.runner.decoder.model)
        assert f"{kind.__module__}.{kind.__name__}" == "vllm.model_executor.models.llama4.Llama4ForCausalLM"
        rounds = [serving.greedy(PROMPTS, TOKENS) for _ in range(2)]
        serving.check_idle()
        held = most_held(serving, PROMPTS[1])
    for answers in rounds:
        reference.assert_greedy(PROMPTS, answers)
    assert [rounds[1][index].cached_tokens for index in (1, 4)] == [144, 128]
    # a chunk in three groups, all of the context in the other one
    assert held == [*[CHUNK // 16] * 3, -(-(150 + TOKENS) // 16)]


def most_held(serving: Engine, prompt: list[int]) -> list[int]:
    """Blocks that a request holds at once in each group, while it decodes; in order."""
    scheduler, most = serving.core.scheduler, [0] * 4
    serving.add(serving.new_id(), prompt, greedy_params(TOKENS))
    while scheduler.has_unfinished_requests():
        serving.step()
        for request in scheduler.requests.values():
            blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
            held = [sum(not block.is_null for block in of_group) for of_group in blocks]
            if request.num_output_tokens > 1:
                most = [max(pair) for pair in zip(most, held, strict=True)]
    return sorted(most)


def test_drafts_and_preemption(model: Path, reference: ReferenceModel) -> None:
    """Drafts that cross into the next chunk and are rejected; requests that are computed again."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with serve(model, speculative_config=drafts, num_gpu_blocks_override=35) as serving:
        found = serving.greedy(PROMPTS, TOKENS)
        assert serving.preemptions
        serving.check_idle()
    reference.assert_greedy(PROMPTS, found)


@pytest.mark.parametrize(("size", "hit"), [(CHUNK, 64), (8, 80), (24, 80)], ids=["of blocks", "in a block", "across"])
def test_a_hit_whose_chunk_is_evicted(size: int, hit: int, tmp_path: Path) -> None:
    """It ends where its chunk begins. Where that is within a block vLLM would read blocks that are gone: chunks that
    are no multiple of a block are served by the blocks of full attention."""
    folder = make_model(tmp_path, window_config("llama4_text", attention_chunk_size=size))
    with serve(folder, num_gpu_blocks_override=60) as serving:
        assert len(serving.core.scheduler.kv_cache_config.kv_cache_groups) == (4 if size == CHUNK else 1)
        asked = [PROMPTS[1], [RNG.randrange(3, VOCAB) for _ in range(160)], PROMPTS[1][:83]]
        answers = [serving.greedy([prompt], 24)[0] for prompt in asked]
    assert answers[2].cached_tokens == hit
    ReferenceModel(folder, "eager").assert_greedy(asked, answers)


def test_memory_mode_needs_chunks_of_whole_blocks(model: Path) -> None:
    """All layers have one block table otherwise, and layers with chunks would read what has left."""
    with pytest.raises(
        UnsupportedFeatureError, match=r"memory mode with layers with windows or chunks .* whole blocks"
    ):
        Engine(model, {"ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}}, block_size=3 * CHUNK // 2)


def test_several_experts_that_weigh_their_rows_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, window_config("llama4_text", num_experts_per_tok=2))
    with pytest.raises(UnsupportedFeatureError, match=r"several experts for each row .*layers\.1\.feed_forward"):
        Engine(folder)
