"""Decoder families that vLLM loads with plain full attention give the tokens of Transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import FAMILIES, VOCAB, make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

ARCHITECTURES = {
    "llama": "llama.LlamaForCausalLM",
    "qwen2": "qwen2.Qwen2ForCausalLM",
    "qwen3": "qwen3.Qwen3ForCausalLM",
    "mistral": "mistral.MistralForCausalLM",
    "granite": "granite.GraniteForCausalLM",
    "opt": "opt.OPTForCausalLM",
    "deepseek_v2": "deepseek_v2.DeepseekV2ForCausalLM",
    "gpt2": "gpt2.GPT2LMHeadModel",
}


# see test_moe.py
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"}


def prompts(count: int = 6, longest: int = 200) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, longest, *(rng.randrange(2, longest) for _ in range(count - 2))]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - MIXTURES))
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Several chunks per prompt, prompts and decodes mixed. covers: A12"""
    model = make_model(tmp_path, make_config(family))
    with Engine(model, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        kind = type(engine.runner.decoder.model)
        answers = engine.greedy(prompts(), 32)
        engine.check_idle()
    # vLLM's own class, not its fallback to the code of Transformers
    assert f"{kind.__module__}.{kind.__name__}" == f"vllm.model_executor.models.{ARCHITECTURES[family]}"
    ReferenceModel(model).assert_greedy(prompts(), answers)


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
