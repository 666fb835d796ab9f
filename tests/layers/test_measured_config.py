"""Which layers `--quantization inc` quantises, with which scales, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear

from tests.layers.measured_files import NODES, write_files
from vllm_gaudi_ucm.layers.measured import config as measured
from vllm_gaudi_ucm.layers.measured.config import MeasuredCacheMethod, UcmIncConfig
from vllm_gaudi_ucm.layers.measured.quant_config import QuantConfigError
from vllm_gaudi_ucm.layers.quantised.formats import PlainFormat
from vllm_gaudi_ucm.layers.quantised.method import QuantisedLinearMethod
from vllm_gaudi_ucm.vllm_api.model import Attention, ParallelLMHead, UnquantizedLinearMethod
from vllm_gaudi_ucm.vllm_api.quantisation import RoutedExperts

ATTENTION = "model.layers.0.self_attn.attn"
CACHES = {
    f"{ATTENTION}.impl.{name}": {"inputs": [[[value]]]} for name, value in (("k_cache", 112.0), ("v_cache", 28.0))
}
QKV, EXPERTS = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts"
ALL: dict[str, Any] = {
    QKV: NODES["model.layers.0.mlp.down_proj"],
    f"{EXPERTS}.moe_op": {"inputs": [[[3.0]]]},
    **CACHES,
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def made(monkeypatch: pytest.MonkeyPatch, path: Path) -> UcmIncConfig:
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    return UcmIncConfig()


def layer_of(kind: type[nn.Module], **attributes: Any) -> Any:
    found = kind.__new__(kind)
    nn.Module.__init__(found)
    vars(found).update(attributes)
    return found


def form_of(method: Any) -> PlainFormat:
    assert isinstance(method, QuantisedLinearMethod)
    assert isinstance(method._form, PlainFormat)
    return method._form


def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, write_files(tmp_path, ALL, blocklist={"names": ["o_proj"]}))
    linear = layer_of(QKVParallelLinear)
    weight = form_of(found.get_quant_method(linear, QKV)).quantise(torch.full((16, 8), 0.25))
    assert weight.narrowing is not None
    # 3.5 and 0.25 of a Gaudi 3, with parts of the range of a quarter and a half
    assert (float(weight.narrowing.scale), float(weight.scales[0])) == (2.0**-5, 2.0**-9)
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.kv_b_proj"):
        assert isinstance(found.get_quant_method(linear, name), UnquantizedLinearMethod)
    router = layer_of(type("GateLinear", (ReplicatedLinear,), {}))
    assert isinstance(found.get_quant_method(router, "model.layers.0.mlp.gate"), UnquantizedLinearMethod)
    assert found.get_quant_method(layer_of(ParallelLMHead), "lm_head") is None
    assert found.get_quant_method(nn.LayerNorm(4), "norm") is None


@pytest.mark.parametrize(("skips", "blocked"), [(False, False), (True, False), (False, True)])
def test_layers_that_were_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skips: bool, blocked: bool
) -> None:
    lists = {"names": ["qkv_proj", "experts"] if blocked else []}
    path = write_files(tmp_path, ignore_modules_wo_measures=skips, blocklist=lists)
    found, linear = made(monkeypatch, path), layer_of(QKVParallelLinear)
    experts = layer_of(RoutedExperts, moe_config=None)
    if skips or blocked:
        assert isinstance(found.get_quant_method(linear, QKV), UnquantizedLinearMethod)
        assert found.get_quant_method(experts, EXPERTS) is None
        return
    for layer, name in ((linear, QKV), (experts, EXPERTS)):
        with pytest.raises(
            QuantConfigError, match=rf"maxabs_0_1\.json: found no measurement of {name}.* among 1 modules"
        ):
            found.get_quant_method(layer, name)


@pytest.mark.parametrize(("largest", "fits"), [(0.25, True), (0.2505, True), (0.26, False), (0.24, False)])
def test_another_models_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: float, fits: bool
) -> None:
    form = form_of(made(monkeypatch, write_files(tmp_path, ALL)).get_quant_method(layer_of(QKVParallelLinear), QKV))
    if fits:
        form.quantise(torch.full((4, 8), largest))
    else:
        with pytest.raises(QuantConfigError, match=rf"{QKV}: the largest weight was 0\.25 .* is {largest} in this"):
            form.quantise(torch.full((4, 8), largest))
    # a rank's part may be smaller
    monkeypatch.setattr(measured, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    if largest < 0.26:
        form.quantise(torch.full((4, 8), largest))


def cache(config: UcmIncConfig, dtype: str) -> list[float]:
    method = config.get_quant_method(layer_of(Attention, kv_cache_dtype=dtype), ATTENTION)
    assert isinstance(method, MeasuredCacheMethod)
    layer = nn.Module()
    method.create_weights(layer)
    return [float(layer.k_scale), float(layer.v_scale)]


def test_scales_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache of 8-bit floats, none is needed. Latents have one for keys and values."""
    found = made(monkeypatch, write_files(tmp_path / "a", ALL))
    assert cache(found, "fp8") == [1.0, 0.25]
    blocked = made(monkeypatch, write_files(tmp_path / "b", ALL, blocklist={"types": ["VLLMKVCache"]}))
    assert cache(blocked, "auto") == [-1.0, -1.0]
    with pytest.raises(QuantConfigError, match=r"--kv-cache-dtype fp8: .* leaves .*impl\.k_cache out .*dtype auto"):
        cache(blocked, "fp8")
    missing = made(monkeypatch, write_files(tmp_path / "c", ignore_modules_wo_measures=True))
    with pytest.raises(QuantConfigError, match=r"no measurement of .*impl\.k_cache .*take --kv-cache-dtype auto"):
        cache(missing, "fp8")


def test_scales_in_place_of_maxima(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to a card."""
    nodes = {QKV: {"inputs": [2.0**-5], "params": {"weight": 0.001}}}
    path = write_files(tmp_path, nodes, content_mode="Scale")
    weight = form_of(made(monkeypatch, path).get_quant_method(layer_of(QKVParallelLinear), QKV)).quantise(
        torch.ones(4, 8)
    )
    assert weight.narrowing is not None
    assert float(weight.narrowing.scale) == 2.0**-5
    path = write_files(tmp_path, nodes, content_mode="Scale", device_for_scales="GAUDI2")
    with pytest.raises(
        QuantConfigError, match=r"qkv_proj\.inputs: found the scale 0\.03125, .* of a GAUDI2; the scales"
    ):
        made(monkeypatch, path).get_quant_method(layer_of(QKVParallelLinear), QKV)
    path = write_files(tmp_path, {QKV: {"inputs": [0]}}, content_mode="Scale", scale_method="maxabs_pow2")
    with pytest.raises(QuantConfigError, match=r"qkv_proj\.inputs: found the scale 0, expected more than 0"):
        made(monkeypatch, path).get_quant_method(layer_of(QKVParallelLinear), QKV)


def test_methods_without_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_files(tmp_path, scale_method="hw_aligned_single_scale", dump_stats_path=...)
    found = made(monkeypatch, path)
    weight = form_of(found.get_quant_method(layer_of(QKVParallelLinear), QKV)).quantise(torch.ones(4, 8))
    assert weight.narrowing is not None
    assert (float(weight.narrowing.scale), float(weight.scales[0])) == (128.0, 128.0)
    assert cache(found, "fp8") == [128.0, 128.0]


@pytest.mark.parametrize(
    ("card", "asked", "method", "used"),
    [
        ("GAUDI2", None, "maxabs_hw", "GAUDI2"),
        ("GAUDI3", "GAUDI2", "maxabs_hw", "GAUDI2"),
        ("GAUDI3", "GAUDI2", "maxabs_pow2", None),
        ("GAUDI2", "GAUDI3", "maxabs_hw", None),
    ],
)
def test_ranges_of_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, asked: str | None, method: str, used: str | None
) -> None:
    """A Gaudi 3 takes scales of a Gaudi 2 as INC allows it, never the other way round."""
    found = made(monkeypatch, write_files(tmp_path, ALL, device_for_scales=asked, scale_method=method))
    monkeypatch.setattr(measured, "get_device", lambda _: SimpleNamespace(name=lambda: card))
    monkeypatch.setattr(torch, "empty", lambda *_: SimpleNamespace(device=torch.device("hpu")))
    if used is not None:
        assert found._card is measured.RANGES[used]
        return
    with pytest.raises(QuantConfigError, match=rf"device_for_scales: found '{asked}', expected {card} with {method}"):
        assert found._card


def test_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANT_CONFIG", raising=False)
    with pytest.raises(QuantConfigError, match=r"the variable QUANT_CONFIG is not set; .*gaudi-ucm calibrate"):
        UcmIncConfig()
