"""Models with quantised experts give the tokens of Transformers for the exact values of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.quantised_models import (
    SCHEMES,
    Quantise,
    awq,
    compressed_tensors,
    fp8_block,
    gptq,
    write_gpt_oss,
    write_quantised,
)
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.tiny_models import LATENT_EXPERTS, make_config, make_model
from tests.engine.window_models import window_config
from vllm_gaudi_ucm.vllm_api.moe import RoutedExperts

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 3, 61))]
EXPERTS = (
    "fp8 per tensor",
    "fp8 per channel",
    "fp8 per block",
    "int8 per channel",
    "4 bits with zeros",
    "4 bits per channel",
    "mxfp4",
)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], Quantise | None]]] = {
    "compressed-tensors": compressed_tensors(
        {rf".*layers\.{layer}\.mlp\.experts.*": scheme for layer, scheme in enumerate(EXPERTS)}
        | {r".*self_attn.*": "fp8 per channel"}
    ),
    # as llm-compressor writes them: every linear layer but what it leaves out
    "FP8_DYNAMIC": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
            "config_groups": {"group_0": {**SCHEMES["fp8 per channel"].group, "targets": ["Linear"]}},
        },
        lambda _: SCHEMES["fp8 per channel"].quantise,
    ),
    "fp8 blocks": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(2)],
        },
        lambda _: fp8_block("weight_scale_inv"),
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "dynamic": {r"-:.*mlp\.gate$": {}},
        },
        lambda _: gptq(4, 32),
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["mlp.gate"],
        },
        lambda _: awq(32),
    ),
}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return write_gpt_oss(make_model(folder / "random", window_config("gpt_oss", intermediate_size=96)), folder)


# of the elements of experts in codes of 8 bits, in bytes; scales included, which are many in small experts
LEAST_BITS, MOST_BITS = 4, 12
# of experts that stay codes, which formats; the others are written out, which is what a CPU does by itself
STAYING = {"compressed-tensors", "fp8 blocks", "awq"}


def weights(engine: Engine) -> list[torch.Tensor]:
    """Of all experts."""
    layers = [module for module in engine.runner.decoder.model.modules() if isinstance(module, RoutedExperts)]
    return [parameter.data for layer in layers for parameter in layer.parameters()]


def assert_kept(engine: Engine, elements: int, codes: bool) -> None:
    """Memory of the experts, which have so many elements."""
    found = weights(engine)
    size = sum(weight.nbytes for weight in found)
    if codes:
        assert LEAST_BITS * elements <= 8 * size <= MOST_BITS * elements
        return
    assert {weight.dtype for weight in found} == {torch.float32}
    # they are packed, and what the layers have is empty, but for biases
    assert size < elements


def elements_of(model: Path) -> int:
    """Of all experts."""
    tensors = load_file(model / "model.safetensors")
    return sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name and tensor.dim() > 1)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_exact_values(tmp_path: Path, name: str) -> None:
    """As codes, or written out."""
    layers = len(EXPERTS) if name == "compressed-tensors" else 2
    plain = make_model(tmp_path / "random", make_config("qwen3_moe", num_hidden_layers=layers))
    quantised, meant = write_quantised(plain, tmp_path, *FORMATS[name])
    ucm = {"quantised_experts": "codes"} if name in STAYING else {}
    with Engine(quantised, ucm) as engine:
        answers = engine.greedy(PROMPTS, 16)
        assert_kept(engine, elements_of(meant), name in STAYING)
    ReferenceModel(meant).assert_greedy(PROMPTS, answers)


def test_deepseek_in_blocks(tmp_path: Path) -> None:
    """Latent attention makes two matrices of a quantised one; experts beside a shared one, which is a linear layer."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 16}
    plain = make_model(tmp_path / "random", make_config("deepseek_v2", **LATENT_EXPERTS, **sizes))
    quantised, meant = write_quantised(plain, tmp_path, *FORMATS["fp8 blocks"])
    with Engine(quantised) as engine:
        answers = engine.greedy(PROMPTS, 16)
    ReferenceModel(meant).assert_greedy(PROMPTS, answers)


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_experts_of_gpt_oss(gpt_oss: tuple[Path, Path], mode: str) -> None:
    """At true shapes as codes, and in buckets written out."""
    quantised, meant = gpt_oss
    kept = "codes" if mode == "off" else "plain"
    ucm = {"graphs": {"mode": mode, "warm_up": "skeleton", "max_graphs": 3}, "quantised_experts": kept}
    with Engine(quantised, ucm, max_num_batched_tokens=64) as engine:
        answers = engine.greedy(PROMPTS, 16)
        assert_kept(engine, elements_of(meant), mode == "off")
    ReferenceModel(meant, "eager").assert_greedy(PROMPTS, answers)


def test_scales_that_are_missing(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    """Not served with others in their place."""
    quantised, _ = gpt_oss
    (tmp_path / "config.json").write_bytes((quantised / "config.json").read_bytes())
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks tensors .*layers\.1\.mlp\.experts.*w2_weight_scale"):
        Engine(tmp_path)
