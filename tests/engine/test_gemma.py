"""Gemma 3 270M gives the tokens and logprobs of Transformers: windows in some layers, real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.static_shapes import static
from tests.engine.texts import SHORT, story

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "gemma3-270m"

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(not MODEL.is_dir(), reason="`make test-models` fetches the model"),
]

MAX_TOKENS = 32
WINDOW = 512
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": 1152,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": True,
}


def serve(ucm: dict[str, Any], count: int = 6, **options: Any) -> tuple[list[list[int]], list[Answer]]:
    """Short texts, one whose answer outgrows a window, and one of more than two windows: chunks and decodes together.

    Returns the first `count` prompts and their answers.
    """
    with Engine(MODEL, ucm, **{**OPTIONS, **options}) as engine:
        tokenizer = engine.llm.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in [*SHORT[:4], story(50, 1), story(108, 2)]][:count]
        assert all(prompt[0] == tokenizer.bos_token_id for prompt in prompts)
        assert WINDOW - MAX_TOKENS < len(prompts[4]) < WINDOW
        assert count < 6 or len(prompts[5]) > 2 * WINDOW
        answers = engine.greedy(prompts, MAX_TOKENS)
        assert "the capital of the country of France" in tokenizer.decode(answers[0].tokens), "the weights are real"
        again = engine.alone(prompts[-1:], MAX_TOKENS)
        assert_same(again, answers[-1:])
        assert again[0].cached_tokens
        engine.check_idle()
    return prompts, answers


@pytest.fixture(scope="module")
def served() -> tuple[list[list[int]], list[Answer]]:
    return serve({})


def test_greedy_tokens_of_texts(served: tuple[list[list[int]], list[Answer]]) -> None:
    ReferenceModel(MODEL).assert_greedy(*served)


def test_the_same_in_buckets(served: tuple[list[list[int]], list[Answer]]) -> None:
    """Serves all prompts but the longest, which makes buckets of the reference slow."""
    assert_same(serve(static(max_graphs=4), 5, max_model_len=576)[1], served[1][:5])
