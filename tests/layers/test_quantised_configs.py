"""What our methods of quantised weights take, and what they refuse by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.layers.experts import layer
from tests.layers.quantised_configs import arguments
from vllm_gaudi_ucm.layers.quantised import configs
from vllm_gaudi_ucm.layers.quantised.configs import (
    METHODS,
    UcmAWQConfig,
    UcmCompressedTensorsConfig,
    UcmFp8Config,
    format_of_scheme,
)
from vllm_gaudi_ucm.layers.quantised.experts import QuantisedExpertsMethod
from vllm_gaudi_ucm.layers.quantised.formats import AwqFormat, PackedIntegers, ScaledFormat
from vllm_gaudi_ucm.layers.quantised.method import QuantisedLinearMethod
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, RowRounding
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.quantised_weights import SERVED
from vllm_gaudi_ucm.vllm_api.model import LinearBase, ParallelLMHead
from vllm_gaudi_ucm.vllm_api.quantisation import RoutedExperts

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "quantisation.md"


class Experts(RoutedExperts):
    """Without a model."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.moe_config = "sizes"
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate", "up", "down"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What methods of experts are made of."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(configs, "QuantisedExpertsMethod", lambda *given, **_: found.append(given))
    return found


def test_methods_are_those_that_start() -> None:
    assert set(METHODS) == SERVED
    text = GUIDE.read_text(encoding="utf-8")
    assert {name for name in ("compressed-tensors", "fp8", "gptq", "awq") if f"`{name}`" not in text} == set()


def test_static_scales_of_activations_are_loaded() -> None:
    scheme = {"format": "int-quantized", "weights": arguments("int", 8, "tensor")}
    inputs = arguments("int", 8, "tensor", symmetric=False)
    found = format_of_scheme({**scheme, "input_activations": inputs})
    assert found == ScaledFormat(torch.int8, "tensor", static_inputs=True, zero_of_inputs=True, rounds_inputs=True)
    by_row = format_of_scheme({**scheme, "input_activations": arguments("int", 8, "token", dynamic=True)})
    assert by_row == ScaledFormat(torch.int8, "tensor", rounds_inputs=True)
    assert format_of_scheme({**scheme, "input_activations": None}) == ScaledFormat(torch.int8, "tensor")


def test_packed_integers_per_channel() -> None:
    found = format_of_scheme({"format": "pack-quantized", "weights": arguments("int", 4, "channel")})
    assert found == PackedIntegers(4, None, symmetric=True)


@pytest.mark.parametrize(
    "scheme",
    [
        {"format": "nvfp4-pack-quantized", "weights": arguments("float", 4, "tensor_group", group_size=16)},
        {"format": "mxfp8-quantized", "weights": arguments("float", 8, "group", group_size=32)},
        {"format": "pack-quantized", "weights": arguments("int", 3, "group", group_size=32)},
        {
            "format": "pack-quantized",
            "weights": arguments("int", 4, "group", group_size=32),
            "input_activations": arguments("int", 8, "token", dynamic=True),
        },
        {"format": "float-quantized", "weights": arguments("float", 8, "tensor", dynamic=True)},
        {
            "format": "int-quantized",
            "weights": arguments("int", 8, "channel"),
            "input_activations": arguments("int", 8, "group", dynamic=True, group_size=32),
        },
        {
            "format": "int-quantized",
            "weights": arguments("int", 8, "channel"),
            "input_activations": arguments("float", 8, "token", dynamic=True),
        },
        {
            "format": "int-quantized",
            "weights": arguments("int", 8, "channel"),
            "output_activations": arguments("int", 8, "tensor"),
        },
    ],
    ids=lambda scheme: str(scheme["format"]),
)
def test_schemes_that_are_refused(scheme: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="quantise with the scheme FP8_DYNAMIC"):
        format_of_scheme(scheme)


def test_an_output_head_is_refused() -> None:
    config = UcmAWQConfig(4, 32, zero_point=True, lm_head_quantized=True)
    with pytest.raises(UnsupportedFeatureError, match="output head"):
        config.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head")


def test_what_latent_attention_takes_apart_is_plain() -> None:
    layer = LinearBase.__new__(LinearBase)
    for config in (UcmFp8Config(), UcmAWQConfig(4, 32, zero_point=True, lm_head_quantized=False)):
        names = ("model.layers.1.self_attn.kv_b_proj", "model.layers.1.self_attn.o_proj")
        found = [config.get_quant_method(layer, name) for name in names]
        assert [isinstance(one, QuantisedLinearMethod) and one.plain for one in found] == [True, False]


def test_experts_that_a_checkpoint_leaves_out(made: list[tuple[Any, ...]]) -> None:
    """They are vLLM's unquantised layers, which have a method of ours."""
    name = "model.layers.1.mlp.experts"
    fp8 = UcmFp8Config(ignored_layers=[name])
    assert fp8.get_quant_method(Experts(), name) is None
    fp8.get_quant_method(Experts(), "model.layers.2.mlp.experts")
    awq = UcmAWQConfig(4, 32, zero_point=True, lm_head_quantized=False, modules_to_not_convert=["layers.1.mlp"])
    assert awq.get_quant_method(Experts(), name) is None
    awq.get_quant_method(Experts(), "model.layers.2.mlp.experts")
    assert made == [("sizes", ScaledFormat(torch.float8_e4m3fn, "tensor")), ("sizes", AwqFormat(32, has_zeros=True))]


def test_experts_that_are_refused(made: list[tuple[Any, ...]]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="experts of mxfp4 in an fp8 checkpoint"):
        UcmFp8Config(store_dtype="mxfp4").get_quant_method(Experts(), "model.layers.1.mlp.experts")
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"weights": weights, "targets": ["re:.*gate"], "format": "float-quantized"}
    config = UcmCompressedTensorsConfig.from_config(
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"one": group}}
    )
    with pytest.raises(UnsupportedFeatureError, match=r"experts model\.layers\.1\.mlp\.experts in different schemes"):
        config.get_quant_method(Experts(), "model.layers.1.mlp.experts")
    assert made == []


def test_what_quantised_experts_do_not_compute() -> None:
    """Halves of the first product are no gates and ups where these stand in turn; the rest is refused as ever."""
    method = QuantisedExpertsMethod.__new__(QuantisedExpertsMethod)
    nn.Module.__init__(method)
    method._whole_groups = False
    found = layer("swigluoai", has_bias=True, experts_per_token=2)
    found.apply_router_weight_on_input = False
    with pytest.raises(UnsupportedFeatureError, match=r"a format other than gpt-oss's `mxfp4` .*model\.layers\.1"):
        method.create_weights(found)
    found.apply_router_weight_on_input = True
    with pytest.raises(UnsupportedFeatureError, match=r"several experts for each row with shares that weigh the rows"):
        method.create_weights(found)


def test_scales_that_are_missing() -> None:
    """Not served as rows of NaN."""
    weight = QuantisedWeight(torch.zeros(4, 8, dtype=torch.int8), torch.full((4, 1), torch.nan), (1, 8))
    form: Any = SimpleNamespace(read=lambda layer: weight)
    linear: Any = SimpleNamespace(prefix="model.layers.0.mlp.up_proj", params_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj: scales of a quantised layer are missing"):
        QuantisedLinearMethod(form).process_weights_after_loading(linear)
    weight = weight._replace(scales=torch.ones(4, 1), rounding=RowRounding(scale=torch.tensor(torch.nan)))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj: scales of a quantised layer are missing"):
        QuantisedLinearMethod(form).process_weights_after_loading(linear)
