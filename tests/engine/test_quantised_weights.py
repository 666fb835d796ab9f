"""Models with quantised weights give the tokens of Transformers for the exact values of the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.hpu_process import run_on_card
from tests.engine.narrowed_linears import NarrowedModel
from tests.engine.quantised_models import (
    Quantise,
    awq,
    compressed_tensors,
    fp8_block,
    fp8_tensor,
    gptq,
    write_quantised,
)
from tests.engine.reference_model import ReferenceModel
from tests.engine.rounded_linears import assert_rounded, rounded_reference
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.layers.quantised.method import LARGEST

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 3, 90, 17))]
# fused layers (q, k and v; gate and up) have one scheme
MIXED = {
    r".*layers\.0\.self_attn\.[qkv]_proj": "fp8 per tensor",
    r".*layers\.0\.self_attn\.o_proj": "fp8 per channel",
    r".*layers\.0\.mlp\.(gate|up)_proj": "fp8 per block",
    r".*layers\.0\.mlp\.down_proj": "int8 per channel",
    r".*layers\.1\.self_attn\.[qkv]_proj": "4 bits with zeros",
    r".*layers\.1\.self_attn\.o_proj": "int8 per tensor",
    r".*layers\.1\.mlp\.(gate|up)_proj": "4 bits in groups",
    r".*layers\.1\.mlp\.down_proj": "mxfp4",
    r".*layers\.2\.self_attn\.[qkv]_proj": "fp8 per channel",
    r".*layers\.2\.self_attn\.o_proj": "4 bits per channel",
    r".*layers\.2\.mlp\.(gate|up)_proj": "int8 per tensor",
    r".*layers\.2\.mlp\.down_proj": "8 bits in groups",
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], Quantise | None]]] = {
    "compressed-tensors": compressed_tensors(MIXED),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda _: fp8_tensor()),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda _: fp8_block("weight_scale_inv"),
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "dynamic": {r"+:.*layers\.1\.mlp.*": {"bits": 8}, r"+:.*layers\.2\..*": {"group_size": -1}},
        },
        lambda name: gptq(8 if "layers.1.mlp" in name else 4, None if "layers.2." in name else 32),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda _: awq(32),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain"), make_config("llama", num_hidden_layers=3))


def written(plain: Path, folder: Path, name: str) -> tuple[Path, Path]:
    config, choose = FORMATS[name]
    return write_quantised(plain, folder, config, choose)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_exact_values(plain: Path, tmp_path: Path, name: str) -> None:
    quantised, meant = written(plain, tmp_path, name)
    with Engine(quantised) as engine:
        answers = engine.greedy(PROMPTS, 24)
    if name == "compressed-tensors":
        assert_rounded(rounded_reference(meant, quantised, MIXED), PROMPTS, answers)
    else:
        ReferenceModel(meant).assert_greedy(PROMPTS, answers)


# fused layers have a scale for the rows of each matrix, of which they take one that holds all
ROUNDED = {
    r".*\.[qkv]_proj": "int8, fixed rows with a zero",
    r".*\.o_proj": "int8 per channel",
    r".*\.(gate|up)_proj": "int8, fixed rows",
    r".*\.down_proj": "int8, rows with zeros",
}


@pytest.mark.parametrize("graphs", [{"mode": "off"}, {"mode": "eager", "warm_up": "skeleton", "max_graphs": 3}])
def test_rows_are_rounded_as_the_checkpoint_says(plain: Path, tmp_path: Path, graphs: dict[str, Any]) -> None:
    """At true shapes, where small steps are graphs of native calls, and in buckets."""
    quantised, meant = write_quantised(plain, tmp_path, *compressed_tensors(ROUNDED))
    with Engine(quantised, {"graphs": graphs}, max_num_batched_tokens=64) as engine:
        answers = engine.greedy(PROMPTS, 24)
        dtypes = {weight.dtype for weight in engine.runner.decoder.model.parameters()}
    assert_rounded(rounded_reference(meant, quantised, ROUNDED), PROMPTS, answers)
    if torch.int8 in dtypes:
        with pytest.raises(AssertionError):
            assert_rounded(ReferenceModel(meant), PROMPTS, answers)


# behind three layers without experts
EXPERTS = ("fp8 per tensor", "fp8 per channel", "fp8 per block", "4 bits with zeros", "mxfp4")


def test_two_workers(tmp_path: Path) -> None:
    """In buckets. Each worker loads its part of every format; a scale of a whole matrix is on both."""
    layers = {"num_hidden_layers": 3 + len(EXPERTS), "mlp_only_layers": [0, 1, 2], "moe_intermediate_size": 64}
    plain = make_model(tmp_path / "random", make_config("qwen2_moe", **layers))
    experts = {rf".*layers\.{layer}\.mlp\.experts.*": scheme for layer, scheme in enumerate(EXPERTS, 3)}
    quantised, meant = write_quantised(plain, tmp_path, *compressed_tensors(MIXED | experts))
    ucm = {"distributed": {"check_ranks": True}, "graphs": {"mode": "eager", "warm_up": "skeleton", "max_graphs": 3}}
    with Engine(quantised, ucm, tensor_parallel_size=2, max_num_batched_tokens=64) as engine:
        answers = engine.greedy(PROMPTS, 12)
    assert_rounded(rounded_reference(meant, quantised, MIXED, ranks=2), PROMPTS, answers)


def serve_on_card(runs: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Of each run (model, options, tokens of an answer), one after the other."""
    found = {}
    for name, (model, ucm, max_tokens) in runs.items():
        with Engine(Path(model), ucm, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20) as engine:
            answers = [dataclasses.asdict(answer) for answer in engine.greedy(PROMPTS, max_tokens)]
            served = engine.runner.decoder.model
            dtypes = {str(weight.dtype) for weight in served.parameters()}
            experts = {str(weight.dtype) for name, weight in served.named_parameters() if ".experts." in name}
            found[name] = {"answers": answers, "dtypes": sorted(dtypes), "experts": sorted(experts)}
    return found


# Rows stay as they are: everything but 8-bit floats with a scale per output.
EXACT_ON_CARD = {pattern: scheme.replace("fp8 per channel", "mxfp4") for pattern, scheme in MIXED.items()}
EXACT_ON_CARD[r".*layers\.0\.self_attn\.[qkv]_proj"] = "fp8 per block"
EIGHT_BITS = {r".*\.[qkv]_proj": "fp8 per tensor", r".*\.(o|gate|up|gate_up|down)_proj": "fp8 per channel"}
EXPERT_CODES = {r".*\.mlp\.experts.*": "fp8 per channel"}
COMPILED = {"graphs": {"warm_up": "skeleton", "max_graphs": 2}}


class OnCard(NamedTuple):
    """What was served, and the values that are meant."""

    found: dict[str, Any]
    meant: Path


@pytest.fixture(scope="module")
def on_card(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, OnCard]:
    """Of each model, in one process."""
    folder = tmp_path_factory.mktemp("card")
    mixed = make_model(folder / "mixed", make_config("qwen3_moe", mlp_only_layers=[1]))
    experts = make_model(folder / "experts", make_config("qwen3_moe"))
    cases: dict[str, tuple[Path, dict[str, str], dict[str, Any], int]] = {
        "exact products": (plain, EXACT_ON_CARD, COMPILED, 8),
        "floats of eight bits": (mixed, EIGHT_BITS, {"graphs": {"mode": "off"}}, 8),
        "experts of eight bits": (experts, EXPERT_CODES, {**COMPILED, "quantised_experts": "codes"}, 1),
    }
    runs: dict[str, list[Any]] = {}
    meant = {}
    for name, (model, schemes, ucm, max_tokens) in cases.items():
        quantised, meant[name] = write_quantised(model, folder / name, *compressed_tensors(schemes))
        runs[name] = [str(quantised), ucm, max_tokens]
    found = run_on_card(serve_on_card, folder, runs=runs).result
    return {name: OnCard(found[name], meant[name]) for name in cases}


def test_exact_products_on_a_card(on_card: dict[str, OnCard]) -> None:
    """In regions of torch.compile: weights of 4 bits stay as they are, others are written out."""
    found, meant = on_card["exact products"]
    assert found["dtypes"] == ["torch.float32", "torch.int32"]
    ReferenceModel(meant).assert_greedy(PROMPTS, [Answer(**answer) for answer in found["answers"]])


def test_floats_of_eight_bits_on_a_card(on_card: dict[str, OnCard]) -> None:
    """At true shapes. Tokens and logprobs match a model whose rows are rounded. Experts, in one of two layers,
    become plain weights, whose rows are not.
    """
    found, meant = on_card["floats of eight bits"]
    assert found["dtypes"] == ["torch.float32", "torch.float8_e4m3fn"]
    answers = [Answer(**answer) for answer in found["answers"]]
    NarrowedModel(ReferenceModel(meant), r".*_proj", LARGEST).assert_greedy(PROMPTS, answers)


def test_experts_of_eight_bits_on_a_card(on_card: dict[str, OnCard]) -> None:
    """Codes in regions of torch.compile: half the bytes of bfloat16."""
    found, meant = on_card["experts of eight bits"]
    assert found["experts"] == ["torch.float32", "torch.float8_e4m3fn"]
    assert_near(found, meant)


def assert_near(found: dict[str, Any], meant: Path) -> None:
    """Of each prompt's first token."""
    reference = ReferenceModel(meant)
    for prompt, answer in zip(PROMPTS, found["answers"], strict=True):
        exact = reference.logprobs(prompt, 1)[0, answer["tokens"][0]]
        assert abs(answer["logprobs"][0] - float(exact)) < 1.0
