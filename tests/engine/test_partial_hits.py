"""`ucm.kv_cache.partial_hits`: requests take parts of blocks as copies; no answer changes, and less is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.serving import Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

RNG = random.Random(5)
ON: dict[str, Any] = {"kv_cache": {"partial_hits": True}}
BLOCK = 16
COMMON = [RNG.randrange(3, VOCAB) for _ in range(3 * BLOCK + 11)]


def prompts(count: int, common: int) -> list[list[int]]:
    return [COMMON[:common] + [RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 30))] for _ in range(count)]


def test_a_common_start_of_any_length_is_computed_once(tiny_llama: Path) -> None:
    asked = prompts(6, len(COMMON))
    with Engine(tiny_llama) as engine:
        wanted = engine.alone(asked)
    with Engine(tiny_llama, ON) as engine:
        answers = engine.alone(asked)
        assert_same(answers, wanted)
        assert [answer.cached_tokens >= len(COMMON) for answer in answers] == [False, *5 * [True]]
        totals = engine.core.scheduler.block_rules.totals
        assert totals.copies >= 5
        engine.check_idle()


def test_requests_that_begin_together_wait_for_the_first(tiny_llama: Path) -> None:
    """n = 8: the prompt is computed once, but for each one's last token."""
    prompt = COMMON[: 2 * BLOCK + 12]
    params = SamplingParams(n=8, temperature=1.0, seed=4, max_tokens=12)
    scheduled = {}
    for name, ucm in (("blocks", {}), ("tokens", ON)):
        with Engine(tiny_llama, ucm) as engine:
            count = count_scheduled(engine)
            (output,) = engine.generate([prompt], params)
            scheduled[name] = count[0]
            answers = sorted(list(one.token_ids) for one in output.outputs)
            assert len(answers) == 8
            engine.check_idle()
    decodes = 8 * 11
    assert scheduled["blocks"] - decodes == len(prompt) + 7 * 12
    assert scheduled["tokens"] - decodes == len(prompt) + 7


def count_scheduled(engine: Engine) -> list[int]:
    """Tokens that steps have computed, in a list of one."""
    count = [0]
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        count[0] += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counting
    return count


def test_not_without_a_prefix_cache(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="partial_hits without a prefix cache"):
        Engine(tiny_llama, ON, enable_prefix_caching=False)


def test_greedy_params_are_used(tiny_llama: Path) -> None:
    """Chunks that end inside of a block, in a cache so small that requests are preempted."""
    asked = prompts(10, 2 * BLOCK + 5) + prompts(4, 5)
    options: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 24}
    with Engine(tiny_llama, **options) as engine:
        wanted = engine.alone(asked, 40)
    with Engine(tiny_llama, ON, **options, num_gpu_blocks_override=24) as engine:
        assert_same(engine.staggered(asked, [3 * index for index in range(len(asked))], 40), wanted)
        assert engine.preemptions
        assert engine.core.scheduler.block_rules.totals.copies
        engine.check_idle()
    assert greedy_params(1).temperature == 0
