"""Decoder families that vLLM loads with plain full attention give the tokens of Transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.connector import file_store, transfer
from tests.engine.families import prompts
from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import FAMILIES, MIXTURES, make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

ARCHITECTURES = {
    "llama": "llama.LlamaForCausalLM",
    "qwen2": "qwen2.Qwen2ForCausalLM",
    "qwen3": "qwen3.Qwen3ForCausalLM",
    "mistral": "mistral.MistralForCausalLM",
    "granite": "granite.GraniteForCausalLM",
    "opt": "opt.OPTForCausalLM",
    "deepseek_v2": "deepseek_v2.DeepseekV2ForCausalLM",
    "deepseek_v3": "deepseek_v2.DeepseekV3ForCausalLM",
    "deepseek_v32": "deepseek_v2.DeepseekV3ForCausalLM",
    "glm_moe_dsa": "deepseek_v2.GlmMoeDsaForCausalLM",
    "gpt2": "gpt2.GPT2LMHeadModel",
    "mixtral": "mixtral.MixtralForCausalLM",
    "qwen2_moe": "qwen2_moe.Qwen2MoeForCausalLM",
    "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
    "olmoe": "olmoe.OlmoeForCausalLM",
    "glm4_moe": "glm4_moe.Glm4MoeForCausalLM",
}


# Prompts come in chunks, and a cache of 27 blocks has room for few requests, of up to 17 blocks.
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 288,
    "num_gpu_blocks_override": 28,
}
ON_CARD: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 128}
# see test_hpu_engine.py, test_moe.py, test_latent_attention.py
ON_CARD_ELSEWHERE = {"llama", "mixtral", "qwen2_moe", "deepseek_v2"}
# but for biases and norms, their layers are those of llama, qwen3_moe and deepseek_v3
ON_CARD_ALIKE = {"mistral", "qwen2", "olmoe", "deepseek_v32", "glm_moe_dsa"}
LENGTH = 48
# of answers that lose no block, and find none: more than a block, and a few
LONGER, FEW = 20, 8
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


# on the simulated card
FAMILIES_ON_CARD = sorted(set(FAMILIES) - ON_CARD_ELSEWHERE - ON_CARD_ALIKE)
CARD_PROMPTS = [prompt[:100] for prompt in prompts(4)]


def serve(model: Path, ucm: dict[str, Any], **options: Any) -> tuple[str, list[Answer]]:
    """vLLM's class of the model, and answers: of all prompts, in chunks and with preempted requests; then twice of the
    longest, the second time with its blocks in the cache."""
    with Engine(model, ucm, **TIGHT, **options) as engine:
        kind = type(engine.runner.decoder.model)
        answers = engine.greedy(prompts(), LENGTH)
        assert engine.preemptions > 0
        longest = prompts()[1]
        again = [engine.greedy([longest], FEW)[0] for _ in range(2)]
        assert again[1].cached_tokens == (len(longest) - 1) // 16 * 16
        engine.check_idle()
    return f"{kind.__module__}.{kind.__name__}", [*answers, *again]


# less those that have files of their own: test_same_outputs.py and others, test_latent_attention.py
OTHERS = sorted(set(FAMILIES) - {"llama", "deepseek_v2"})
# experts change nothing of where keys and values lie: mixtral is one for all
ATTENDING = [name for name in OTHERS if name not in MIXTURES - {"mixtral"}]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(family), make_config(family))


@pytest.fixture(scope="module")
def served(model: Path) -> tuple[str, list[Answer]]:
    return serve(model, {})


def test_greedy_tokens_are_those_of_transformers(family: str, model: Path, served: tuple[str, list[Answer]]) -> None:
    """Plain, in chunks, with a prefix in the cache, and preempted. covers: A12"""
    kind, answers = served
    # vLLM's own class, not its fallback to the code of Transformers
    assert kind == f"vllm.model_executor.models.{ARCHITECTURES[family]}"
    longest = prompts()[1]
    ReferenceModel(model).assert_greedy([*prompts(), longest, longest], answers)


@pytest.mark.parametrize("family", OTHERS, indirect=True, scope="module")
def test_buckets_drafts_and_swaps(model: Path, served: tuple[str, list[Answer]]) -> None:
    """The same in padded steps that verify drafts; what is preempted comes back from host memory."""
    ucm = {
        "graphs": {"mode": "eager", "max_graphs": 6},
        "preemption": {"mode": "swap", "host_memory": 4 << 20},
    }
    assert_same(serve(model, ucm, speculative_config=DRAFTS)[1], served[1], near_ties=2)


@pytest.mark.parametrize("family", ATTENDING, indirect=True, scope="module")
def test_all_blocks_chosen_and_stored(model: Path, served: tuple[str, list[Answer]], tmp_path: Path) -> None:
    """A sparse method with a budget of all blocks; what the device forgets comes back from the store."""
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}
    config = transfer(file_store(tmp_path))
    with Engine(model, ucm, kv_transfer_config=config, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        for length in (LONGER, FEW):
            found = engine.greedy(prompts(), length)
            assert_same(found, [answer.first(length) for answer in served[1][: len(found)]])
            assert found[1].cached_tokens == (0 if length == LONGER else (len(prompts()[1]) - 1) // 16 * 16)
            for _ in range(3):
                engine.step()
            assert engine.runner.transfer is not None
            connector: Any = engine.runner.transfer.connector
            assert connector.worker_side.saver.flush(60.0)
            assert engine.core.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("family", ATTENDING, indirect=True, scope="module")
def test_slots_for_tokens(model: Path, served: tuple[str, list[Answer]]) -> None:
    with Engine(model, {"kv_cache": {"granularity": "token"}}, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        found = engine.greedy(prompts(), LONGER)
        engine.check_idle()
    assert_same(found, [answer.first(LONGER) for answer in served[1][: len(found)]])


def serve_all(models: dict[str, str], prompts: list[list[int]]) -> dict[str, Any]:
    """On the card, one engine after the other: of each family the answers to all prompts, the one to the longest again,
    and the graphs that these have compiled."""
    from habana_frameworks.torch.simulator import card

    found = {}
    for name, model in models.items():
        with Engine(Path(model), {"graphs": {"warm_up": "full", "max_graphs": 2}}, **ON_CARD) as engine:
            before = card.compilations
            rounds = [engine.greedy(prompts, 6), engine.greedy(prompts[1:2], 4)]
            assert rounds[1][0].cached_tokens
            found[name] = [[dataclasses.asdict(answer) for answer in answers] for answers in rounds]
            found[name].append(card.compilations - before)
    return {"families": found, "broken": broken_duties()}


@pytest.fixture(scope="module")
def on_card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("card")
    models = {name: str(make_model(folder / name, make_config(name))) for name in FAMILIES_ON_CARD}
    found = run_on_card(serve_all, folder, models=models, prompts=CARD_PROMPTS).result
    return {**found, "models": models}


@pytest.mark.parametrize("name", FAMILIES_ON_CARD)
def test_on_the_simulated_card(name: str, on_card: dict[str, Any]) -> None:
    """Through torch.compile, the default there: once warm nothing is compiled, chunks and prefix hits included."""
    first, second, compiled = on_card["families"][name]
    answers = [Answer(**answer) for answer in first + second]
    ReferenceModel(Path(on_card["models"][name])).assert_greedy([*CARD_PROMPTS, CARD_PROMPTS[1]], answers)
    assert compiled == 0
    assert on_card["broken"] == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Error <= 2 x (error of Transformers in the same precision + an epsilon band)."""
    model = make_model(tmp_path, make_config("llama"), dtype)
    name = str(dtype).removeprefix("torch.")
    with Engine(model, dtype=name, max_num_batched_tokens=64) as engine:
        assert next(engine.runner.decoder.model.parameters()).dtype == dtype
        assert all(blocks.dtype == dtype for blocks in engine.cached_blocks())
        answers = engine.greedy(prompts(), 16)
    exact, low = ReferenceModel(model), ReferenceModel(model)
    low.model.to(dtype)
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens, chosen = [*prompt, *answer.tokens[:-1]], (torch.arange(16), torch.tensor(answer.tokens))
        expected = exact.logprobs(tokens, 16)[chosen]
        found = torch.tensor(answer.logprobs)
        assert torch.isfinite(found).all()
        error = (low.logprobs(tokens, 16)[chosen] - expected).abs().max()
        assert (found - expected).abs().max() <= 2 * (error + 16 * torch.finfo(dtype).eps)


def test_a_model_that_fills_its_context_stops_there(tmp_path: Path) -> None:
    """The last position is computed, and the request ends with its length."""
    model = make_model(tmp_path, make_config("llama"))
    prompt = prompts(2, 60)[1]
    with Engine(model, max_model_len=64) as engine:
        (output,) = engine.generate([prompt], greedy_params(100))
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output.outputs[0].token_ids) == 64
        engine.check_idle()
        (next_one,) = engine.alone([prompt], 4)
    assert next_one.tokens == list(output.outputs[0].token_ids)
