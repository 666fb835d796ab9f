"""A kind of state from outside: a running sum of each request's tokens, kept with blocks, and rolled back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.serving import Answer, Engine, answer_of
from tests.engine.summed_llama import ARCHITECTURE, SummedReference, install, register
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.execution.cache_group import CACHE_GROUPS
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(40)
COMMON = [RNG.randrange(3, VOCAB) for _ in range(70)]
# around the block size, longer than a step, and with blocks in common
PROMPTS = [
    *([RNG.randrange(3, VOCAB) for _ in range(count)] for count in (1, 15, 16, 17, 33, 60, 130)),
    *(COMMON[:count] + [RNG.randrange(3, VOCAB) for _ in range(count % 5)] for count in (32, 48, 65, 70)),
]
MAX_TOKENS = 24
OPTIONS: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": True,
}
FEW_BLOCKS = {"num_gpu_blocks_override": 20}
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
STAGES = {"pipeline_parallel_size": 2}

each_shape = pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
each_way = pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder, while the package is there for this process and those that it starts."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    folder = make_model(tmp_path_factory.mktemp("models") / "summed", make_config("llama"))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [ARCHITECTURE]}))
    with CACHE_GROUPS.scope(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        register()
        yield folder


def check(engine: Engine, model: Path) -> list[Answer]:
    """Every prompt, all at once, against a model that computes them alone."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = [answer_of(output) for output in engine.llm.generate(prompts, params, use_tqdm=False)]
    SummedReference(model).assert_greedy(PROMPTS, answers)
    return answers


@each_shape
@each_way
def test_the_state_follows_its_request_and_is_kept_with_blocks(
    model: Path, ucm: dict[str, Any], asynchronous: bool
) -> None:
    with Engine(model, ucm, **OPTIONS, async_scheduling=asynchronous) as engine:
        check(engine, model)
        again = check(engine, model)
    # prompts begin with the state behind their last cached block
    assert [answer.cached_tokens for answer in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@each_shape
@each_way
def test_a_preempted_request_begins_again(model: Path, ucm: dict[str, Any], asynchronous: bool) -> None:
    with Engine(model, ucm, **{**OPTIONS, **FEW_BLOCKS}, async_scheduling=asynchronous) as engine:
        check(engine, model)
        engine.step()
        engine.check_idle()
        assert asynchronous or engine.preemptions > 0


@each_shape
@pytest.mark.parametrize("method", ["ngram", "draft_model", "draft_model, asynchronous"])
def test_rejected_drafts_are_rolled_back(model: Path, tiny_llama: Path, ucm: dict[str, Any], method: str) -> None:
    """The draft model is a Llama without sums, and is wrong now and then."""
    draft = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 3}
    options = {**OPTIONS, "async_scheduling": "asynchronous" in method}
    with Engine(model, ucm, **options, speculative_config=NGRAM if method == "ngram" else draft) as engine:
        check(engine, model)
        check(engine, model)


@each_shape
def test_two_stages_have_states_of_their_own(model: Path, ucm: dict[str, Any]) -> None:
    """The plugin's own registry finds the kind by its entry point, in processes that this one starts."""
    with EngineOfWorkers(model, ucm, **OPTIONS, **STAGES) as engine:
        check(engine, model)
        check(engine, model)


CONNECTOR = {
    "kv_connector": "UcmConnector",
    "kv_connector_module_path": "vllm_gaudi_ucm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"store": {"kind": "memory", "capacity": 1 << 20}},
}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ucm.kv_cache.granularity", {"kv_cache": {"granularity": "token"}}, {"num_gpu_blocks_override": None}),
    ("ucm.kv_cache.partial_hits", {"kv_cache": {"partial_hits": True}}, {}),
    ("ucm.kv_cache.compaction", {"kv_cache": {"compaction": True}}, {}),
    ("ucm.preemption.mode", {"preemption": {"mode": "swap"}}, {}),
    ("--kv-transfer-config", {}, {"kv_transfer_config": CONNECTOR}),
]


@pytest.mark.parametrize(("option", "ucm", "options"), REFUSED, ids=[option for option, *_ in REFUSED])
def test_what_moves_or_divides_blocks_is_refused(
    model: Path, option: str, ucm: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"layers that keep a state.*{option}"):
        Engine(model, ucm, **{**OPTIONS, **options}).__enter__()


def test_layers_of_no_registered_kind_are_refused(model: Path) -> None:
    with CACHE_GROUPS.scope(), pytest.MonkeyPatch.context() as patch:
        CACHE_GROUPS._things.pop("running sum")
        patch.setattr(CACHE_GROUPS, "_entry_points", lambda: iter(()))
        with pytest.raises(UnsupportedFeatureError, match="layers of the kind RunningSum"):
            Engine(model, {}, **OPTIONS).__enter__()
