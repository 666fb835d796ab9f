"""A checkpoint that lacks a tensor is refused by the tensor's name, whatever the weights' format."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.quantised_models import Quantise, awq, compressed_tensors, fp8_tensor, gptq, write_quantised
from tests.engine.serving import Engine
from tests.engine.tiny_models import make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], Quantise | None]]] = {
    "gptq": (GPTQ, lambda _: gptq(4, 32)),
    "awq": (AWQ, lambda _: awq(32)),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda _: fp8_tensor()),
    "integers": compressed_tensors({r".*_proj": "4 bits in groups"}),
    "integers with zeros": compressed_tensors({r".*_proj": "4 bits with zeros"}),
    "fixed rows": compressed_tensors({r".*_proj": "int8, fixed rows with a zero"}),
}
LAYER = "model.layers.1."
CASES = [
    ("plain", LAYER + "mlp.down_proj.weight"),
    ("plain", LAYER + "self_attn.k_proj.weight"),
    ("plain", LAYER + "mlp.up_proj.weight"),
    ("plain", LAYER + "input_layernorm.weight"),
    ("plain", "model.embed_tokens.weight"),
    ("plain", "lm_head.weight"),
    ("gptq", LAYER + "mlp.down_proj.qweight"),
    ("gptq", LAYER + "self_attn.k_proj.qweight"),
    ("gptq", LAYER + "mlp.gate_proj.scales"),
    ("gptq", LAYER + "input_layernorm.weight"),
    ("gptq", "lm_head.weight"),
    ("awq", LAYER + "mlp.down_proj.qzeros"),
    ("fp8", LAYER + "mlp.down_proj.weight"),
    ("fp8", LAYER + "self_attn.v_proj.weight_scale"),
    ("integers", LAYER + "mlp.down_proj.weight_packed"),
    ("integers with zeros", LAYER + "self_attn.q_proj.weight_zero_point"),
    ("fixed rows", LAYER + "self_attn.q_proj.input_zero_point"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole checkpoint of a format."""
    root = tmp_path_factory.mktemp("whole")
    plain = make_model(root / "plain", make_config("llama", tie_word_embeddings=False))
    made = {"plain": plain}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = write_quantised(plain, root / name, *FORMATS[name])[0]
        return made[name]

    return checkpoint


def without(checkpoint: Path, folder: Path, gone: Callable[[str], bool]) -> Path:
    """A copy of the checkpoint that lacks tensors, by their names."""
    tensors = load_file(checkpoint / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not gone(name)}
    assert len(left) < len(tensors)
    folder.mkdir()
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


def refusal(model: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match="lacks tensors that the model needs") as error:
        Engine(model, **options)
    found = str(error.value)
    assert str(model) in found
    return found


@pytest.mark.parametrize(("name", "gone"), CASES)
def test_the_error_names_checkpoint_and_tensor(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, gone: str
) -> None:
    found = refusal(without(checkpoints(name), tmp_path / "model", lambda tensor: tensor == gone))
    assert f"needs: {gone}. Expected" in found


@pytest.mark.parametrize(
    ("name", "gone"),
    [("gptq", lambda name: name.endswith((".qzeros", ".g_idx"))), ("integers", lambda name: "weight_shape" in name)],
)
def test_tensors_that_no_weight_depends_on_may_lack(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, gone: Callable[[str], bool]
) -> None:
    answers = []
    for model in (checkpoints(name), without(checkpoints(name), tmp_path / "model", gone)):
        with Engine(model) as engine:
            answers.append(engine.greedy([[3, 4, 5, 6, 7]], 8))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["plain", "awq"])
@pytest.mark.parametrize("end", ["3.down_proj", "0.up_proj"])
def test_one_matrix_of_one_expert(tmp_path: Path, name: str, end: str) -> None:
    checkpoint = make_model(tmp_path / "random", make_config("qwen3_moe"))
    if name == "awq":
        config = {**AWQ, "modules_to_not_convert": ["mlp.gate"]}
        checkpoint = write_quantised(checkpoint, tmp_path / name, config, FORMATS[name][1])[0]
    expert = f"model.layers.1.mlp.experts.{end}."
    found = refusal(without(checkpoint, tmp_path / "model", lambda tensor: tensor.startswith(expert)))
    assert expert in found
    assert "experts.1." not in found


def test_a_long_list_is_cut(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    found = refusal(without(checkpoints("plain"), tmp_path / "model", lambda name: name.startswith(LAYER)))
    assert found.count(LAYER) == 8
    assert " and 1 more" in found


TWO_WORKERS = """
import sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], tensor_parallel_size=2, skip_tokenizer_init=True, dtype="float32", max_model_len=128)
"""


def test_each_of_two_workers_looks(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """A worker's error is in the log, which is that of the process that starts the engine."""
    gone = LAYER + "self_attn.v_proj.qweight"
    model = without(checkpoints("gptq"), tmp_path / "model", lambda name: name == gone)
    script = tmp_path / "two_workers.py"
    script.write_text(TWO_WORKERS)
    done = subprocess.run([sys.executable, script, model], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert f"lacks tensors that the model needs: {gone}. Expected" in done.stdout + done.stderr


def test_a_draft_model_is_looked_at_too(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = without(checkpoints("plain"), tmp_path / "model", lambda name: name == LAYER + "mlp.down_proj.weight")
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=rf"{model} lacks tensors .*down_proj\.weight"):
        Engine(checkpoints("plain"), speculative_config=speculation)


def test_vllms_switch_lets_it_pass(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = without(checkpoints("plain"), tmp_path / "model", lambda name: name == LAYER + "mlp.down_proj.weight")
    with Engine(model, model_loader_extra_config={"enable_weights_track": False}) as engine:
        assert len(engine.greedy([[3, 4, 5]], 4)[0].tokens) == 4


@pytest.mark.parametrize("name", ["awq", "integers"])
def test_a_part_of_a_fused_layer_in_another_format(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """vLLM finds `v_proj` in `qkv_proj`, and makes a layer of plain weights for all three."""
    config, choose = FORMATS[name]
    left_out = {"awq": {"modules_to_not_convert": ["v_proj"]}, "integers": {"ignore": ["lm_head", "re:.*v_proj"]}}
    model, _ = write_quantised(
        checkpoints("plain"),
        tmp_path,
        {**config, **left_out[name]},
        lambda layer: None if layer.endswith("v_proj") else choose(layer),
    )
    with pytest.raises(ValueError, match=r"has the tensor model\.layers\.\d\.self_attn\..*need one format") as error:
        Engine(model)
    assert str(model) in str(error.value)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    model = make_model(tmp_path, make_config("llama", tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    with Engine(model) as engine:
        assert len(engine.greedy([[3, 4, 5]], 4)[0].tokens) == 4
