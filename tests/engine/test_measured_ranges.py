"""`--quantization inc`: tokens equal a plain computation that rounds rows and weights by the same scales."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.hpu_process import run_on_card
from tests.engine.measured_models import measure, power_of_two, round_linears
from tests.engine.quantised_models import Quantise, fp8_block, fp8_tensor, write_quantised
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_config, make_model
from tests.layers.measured_files import write_files
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 3, 90, 17))]
# A row's element in the middle of two codes may become either: two sums of float32 differ in their last bits.
NEAR = 0.02
STATIC: dict[str, Any] = {"graphs": {"mode": "eager", "warm_up": "skeleton", "max_graphs": 3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", make_config("llama"))


@pytest.fixture(scope="module")
def nodes(model: Path) -> dict[str, Any]:
    return measure(ReferenceModel(model), PROMPTS)


def rounded(model: Path, nodes: dict[str, Any], card: str = "GAUDI3", **options: Any) -> ReferenceModel:
    reference = ReferenceModel(model)
    round_linears(reference, nodes, card, **options)
    return reference


@pytest.mark.parametrize(
    ("card", "method", "ucm"),
    [
        ("GAUDI3", "maxabs_hw", {}),
        ("GAUDI2", "maxabs_hw", STATIC),
        ("GAUDI3", "act_maxabs_hw_weights_pcs_maxabs_pow2", {}),
    ],
)
def test_tokens(
    model: Path,
    nodes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: str,
    method: str,
    ucm: dict[str, Any],
) -> None:
    """At true shapes, and in buckets."""
    path = write_files(tmp_path, nodes, scale_method=method, device_for_scales=card)
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    with Engine(model, ucm, quantization="inc", max_num_batched_tokens=64) as engine:
        answers = engine.greedy(PROMPTS, 24)
    rounded(model, nodes, card, by_channel="pcs" in method).assert_greedy(PROMPTS, answers, near=NEAR)
    with pytest.raises(AssertionError):
        ReferenceModel(model).assert_greedy(PROMPTS, answers, near=NEAR)


def test_a_cache_with_measured_scales(
    model: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the first layer equal a float32 cache's, rounded in units of the scales."""
    names = {f"model.layers.{i}.self_attn.attn.impl.{kind}_cache": kind for i in range(2) for kind in "kv"}
    maxima = {"k": 6.5, "v": 28.0}
    caches = {name: {"inputs": [[[maxima[kind]]]]} for name, kind in names.items()}
    monkeypatch.setenv("QUANT_CONFIG", str(write_files(tmp_path, {**nodes, **caches})))
    prompt = PROMPTS[2]
    with Engine(model, quantization="inc", kv_cache_dtype="fp8_inc") as engine:
        engine.greedy([prompt], 1)
        narrow = [blocks[1:6].clone() for blocks in engine.cached_blocks()[:2]]
    with Engine(model, quantization="inc") as engine:
        engine.greedy([prompt], 1)
        wide = [blocks[1:6].clone() for blocks in engine.cached_blocks()[:2]]
    for found, exact, kind in zip(narrow, wide, "kv", strict=True):
        scale = float(power_of_two(torch.tensor(maxima[kind] / 112)))
        assert found.dtype == torch.float8_e4m3fn
        assert exact.abs().amax() > 1
        assert torch.equal((exact / scale).clamp(-448, 448).to(found.dtype).float(), found.float())


@pytest.mark.parametrize("quantise", [fp8_tensor(), fp8_block("weight_scale_inv")], ids=["matrix", "block"])
def test_a_checkpoint_of_eight_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantise: Quantise
) -> None:
    """It needs no flag. Its weights are quantised anew, with scales of INC."""
    blocks = (
        {} if quantise(torch.ones(64, 64))[0].keys() == {"weight", "weight_scale"} else {"weight_block_size": [32, 32]}
    )
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks}
    quantised, meant = write_quantised(model, tmp_path / "fp8", config, lambda _: quantise)
    nodes = measure(ReferenceModel(meant), PROMPTS)
    monkeypatch.setenv("QUANT_CONFIG", str(write_files(tmp_path, nodes)))
    with Engine(quantised) as engine:
        answers = engine.greedy(PROMPTS, 12)
    rounded(meant, nodes).assert_greedy(PROMPTS, answers, near=NEAR)


def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's gate and up share a scale. Rows of experts are not rounded."""
    plain = make_model(tmp_path / "plain", make_config("qwen3_moe"))
    tensors = load_file(plain / "model.safetensors")
    meant = dict(tensors)
    for name in tensors:
        if ".mlp.experts." not in name:
            continue
        kinds = ("gate_proj", "up_proj") if name.endswith(("gate_proj.weight", "up_proj.weight")) else ("down_proj",)
        parent = name.rsplit(".", 2)[0]
        top = torch.stack([tensors[f"{parent}.{kind}.weight"].abs().amax() for kind in kinds]).amax()
        scale = power_of_two(top.bfloat16().float() / 224)
        meant[name] = (tensors[name] / scale).to(torch.float8_e4m3fn).float() * scale
    assert any(not torch.equal(meant[name], tensors[name]) for name in tensors)
    (tmp_path / "meant").mkdir()
    (tmp_path / "meant" / "config.json").write_text((plain / "config.json").read_text())
    save_file(meant, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    measured = {f"model.layers.{i}.mlp.experts.moe_op": {"inputs": [[[4.0]]]} for i in range(2)}
    path = write_files(tmp_path, measured, blocklist={"names": ["self_attn"]})
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    with Engine(plain, quantization="inc") as engine:
        answers = engine.greedy(PROMPTS, 12)
    ReferenceModel(tmp_path / "meant").assert_greedy(PROMPTS, answers)


def test_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files of four ranks. Each worker makes scales of its own part of a weight, as INC does."""
    model = make_model(tmp_path / "uneven", make_config("llama"))
    tensors = load_file(model / "model.safetensors")
    for name in (f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(2) for kind in "qo"):
        size = tensors[name].shape[1] // 2
        part = tensors[name][:, :size] if "o_proj" in name else tensors[name][:size]
        part /= 16
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    nodes = measure(ReferenceModel(model), PROMPTS)
    monkeypatch.setenv("QUANT_CONFIG", str(write_files(tmp_path, nodes, ranks=4)))
    with Engine(model, quantization="inc", tensor_parallel_size=2) as engine:
        answers = engine.greedy(PROMPTS, 12)
    rounded(model, nodes, ranks=2).assert_greedy(PROMPTS, answers, near=NEAR)


def serve_on_card(model: str) -> dict[str, Any]:
    ucm = {"graphs": {"warm_up": "skeleton", "max_graphs": 2}}
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20}
    with Engine(Path(model), ucm, quantization="inc", **options) as engine:
        answers = [dataclasses.asdict(answer) for answer in engine.greedy(PROMPTS, 8)]
        dtypes = {str(weight.dtype) for weight in engine.runner.decoder.model.parameters()}
    return {"answers": answers, "dtypes": sorted(dtypes)}


def test_on_a_card(model: Path, nodes: dict[str, Any], tmp_path: Path) -> None:
    """In regions of torch.compile: weights are codes, rows are rounded by the card's operator."""
    env = {"QUANT_CONFIG": str(write_files(tmp_path, nodes))}
    found = run_on_card(serve_on_card, tmp_path, env=env, model=str(model)).result
    assert found["dtypes"] == ["torch.float32", "torch.float8_e4m3fn"]
    answers = [Answer(**answer) for answer in found["answers"]]
    rounded(model, nodes).assert_greedy(PROMPTS, answers, near=NEAR)


def test_a_calibration_is_served(
    model: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gaudi-ucm calibrate` finds the maxima of a plain computation; its files are served as written."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": prompt}) for prompt in PROMPTS))
    command = ["calibrate", str(model), "--prompts", str(prompts), "-o", str(tmp_path / "out"), "--max-tokens", "1"]
    assert cli.main(["--traceback", *command, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["prompts"], found["tokens"]) == (4, 150)
    for name, node in nodes.items():
        assert found["modules"][name]["inputs"] == pytest.approx(node["inputs"][0][0], rel=2.0**-7)
        assert found["modules"][name]["weight"] == node["params"]["weight"][0][0]
    path = Path(found["quant_config"])
    assert path == tmp_path / "out" / model.name / "maxabs_quant_g3.json"
    content = json.loads((path.parent / "g3" / "inc_output_hooks_maxabs_0_1.json").read_text())
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    with Engine(model, quantization="inc", kv_cache_dtype="auto") as engine:
        answers = engine.greedy(PROMPTS, 12)
    rounded(model, content["Nodes"]).assert_greedy(PROMPTS, answers, near=NEAR)
    with Engine(model, quantization="inc", kv_cache_dtype="fp8") as engine:
        assert len(engine.greedy(PROMPTS[:1], 4)[0].tokens) == 4


def test_what_is_refused_at_start(
    model: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded, but for another model's measurements."""
    monkeypatch.delenv("QUANT_CONFIG", raising=False)
    with pytest.raises(ValueError, match="the variable QUANT_CONFIG is not set"):
        Engine(model, quantization="inc")
    monkeypatch.setenv("QUANT_CONFIG", str(write_files(tmp_path / "a", nodes)))
    with pytest.raises(UnsupportedFeatureError, match="measured ranges without `--quantization inc`"):
        Engine(model)
    other = {name: {**node, "params": {"weight": [[0.125]]}} for name, node in nodes.items()}
    monkeypatch.setenv("QUANT_CONFIG", str(write_files(tmp_path / "b", other)))
    with pytest.raises(ValueError, match=r"qkv_proj: the largest weight was 0\.125 .* another model"):
        Engine(model, quantization="inc")
