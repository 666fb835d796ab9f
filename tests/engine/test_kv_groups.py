"""Models with several KV-cache groups give the tokens of Transformers, whatever becomes of a request's blocks.

Every block holds NaN until a request writes it, the null block included, which stands for blocks before a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.hpu_engine import run_on_hpu
from tests.engine.kv_groups import TOKENS, engine, held_at_the_end, prompts
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_model
from tests.engine.window_models import MODELS, window_config

pytestmark = pytest.mark.slow  # starts engines

# Blocks that hold one request of the longest length, and not two of the long prompts.
TIGHT = {"gemma2": 25, "gemma3_text": 54}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Gemma 3 with as many windows for each layer of full attention as those that people run, here alone."""
    of_six = {"num_hidden_layers": 6, "sliding_window_pattern": 6} if request.param == "gemma3_text" else {}
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(request.param, **of_six))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    # the one that computes soft caps
    return ReferenceModel(model, "eager")


@pytest.fixture(scope="module", params=["off", "eager"])
def serving(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with engine(model, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def answers(serving: Engine) -> list[Answer]:
    """Chunks of long prompts beside decodes."""
    found = serving.greedy(prompts(), TOKENS)
    serving.check_idle()
    return found


def test_chunked_prompts(answers: list[Answer], reference: ReferenceModel) -> None:
    reference.assert_greedy(prompts(), answers)


def test_prefix_hits(serving: Engine, answers: list[Answer], reference: ReferenceModel) -> None:
    """A hit needs the blocks of the last window in each group, and all of those with full attention."""
    again = serving.greedy([prompts()[1], prompts()[3]], TOKENS)
    assert [answer.cached_tokens for answer in again] == [144, 128]
    reference.assert_greedy([prompts()[1], prompts()[3]], again)
    serving.check_idle()


def test_windows_free_what_is_behind_them(serving: Engine) -> None:
    """A request of 214 tokens holds the blocks of its windows, and all of the one group with full attention."""
    *windows, whole = held_at_the_end(serving, prompts()[1])
    assert whole == 14
    assert windows == [3] * len(windows)


def test_preempted_requests(model: Path, reference: ReferenceModel) -> None:
    kind = reference.model.config.model_type
    with engine(model, "off", num_gpu_blocks_override=TIGHT[kind]) as tight:
        found = tight.greedy(prompts(), TOKENS)
        assert tight.preemptions
        tight.check_idle()
    reference.assert_greedy(prompts(), found)


def test_one_table_for_all(model: Path, reference: ReferenceModel) -> None:
    """Without vLLM's hybrid manager windows are computed by the blocks of full attention."""
    with engine(model, "off", disable_hybrid_kv_cache_manager=True) as serving:
        assert len(serving.core.scheduler.kv_cache_config.kv_cache_groups) == 1
        found = serving.greedy(prompts(), TOKENS)
    reference.assert_greedy(prompts(), found)


def test_ngram_drafts(model: Path, reference: ReferenceModel) -> None:
    """Several rows of a request, each with a window of its own, of which some are rejected."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(model, "off", speculative_config=drafts) as serving:
        found = serving.greedy(prompts(), 48)
        serving.check_idle()
    reference.assert_greedy(prompts(), found)


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_sinks_and_experts_beside_windows(mode: str, tmp_path: Path) -> None:
    """gpt-oss: all that other families have one of."""
    folder = make_model(tmp_path, window_config("gpt_oss"))
    with engine(folder, mode) as serving:
        assert len(serving.core.scheduler.kv_cache_config.kv_cache_groups) == 2
        answers = [serving.greedy(prompts(), 32) for _ in range(2)]
        serving.check_idle()
    for found in answers:
        ReferenceModel(folder, "eager").assert_greedy(prompts(), found)
    assert answers[1][1].cached_tokens == 144


def test_on_the_simulated_card(tmp_path: Path) -> None:
    """Layers of windows and of full attention are two kinds of one region; the second round hits the prefix cache."""
    folder = make_model(tmp_path / "model", window_config("gemma3_text"))
    asked = [prompt[:100] for prompt in prompts()]
    run = run_on_hpu(
        folder,
        tmp_path,
        {"graphs": {"max_graphs": 3, "warm_up": "full"}},
        rounds=2,
        prompts=asked,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_memory_bytes=1 << 20,
    )
    assert run.device == "hpu:0"
    for answers in run.rounds:
        ReferenceModel(folder, "eager").assert_greedy(asked, answers)
    assert run.rounds[1][1].cached_tokens == 96
