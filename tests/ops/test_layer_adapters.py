"""What vLLM's own managers read of, and call on, the object that has a layer's adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping

from vllm_gaudi_ucm.lora import joined_layers
from vllm_gaudi_ucm.lora.joined_layers import JoinedLinearMethod, can_join, join
from vllm_gaudi_ucm.lora.layer_adapters import LayerAdapters
from vllm_gaudi_ucm.ops.lora.api import Begun
from vllm_gaudi_ucm.vllm_api.lora import BaseLinearLayerWithLoRA
from vllm_gaudi_ucm.vllm_api.model import UnquantizedLinearMethod


def test_vllms_managers_find_the_device_and_may_set_a_mapping() -> None:
    device = torch.device("cpu")
    adapters = LayerAdapters(8, 2, device, lora_config=LoRAConfig(max_loras=2, max_lora_rank=8))
    assert adapters.device == device
    before = dict(vars(adapters))
    adapters.update_metadata(LoRAMapping((1, 2), (1, 2)), [1, 2], 2, 128)
    assert vars(adapters) == before, "a mapping of vLLM's has no effect: the rows' adapters are a row input"


def linear(outputs: int = 16, *, bias: bool = False, rank: int = 4) -> BaseLinearLayerWithLoRA:
    """A layer of vLLM's, as far as joining reads it, with slots for two adapters of two slices."""
    weight = torch.randn(outputs, 8)
    base = SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False),
        bias=torch.zeros(outputs) if bias else None,
        quant_method=UnquantizedLinearMethod(),
    )
    downs, ups = torch.zeros(2, 1, rank, 8), (torch.zeros(2, 1, 12, rank), torch.zeros(2, 1, 4, rank))
    return cast(
        BaseLinearLayerWithLoRA,
        SimpleNamespace(base_layer=base, lora_a_stacked=(downs, downs), lora_b_stacked=ups),
    )


def test_a_layers_weight_and_its_adapters_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter keeps its values and stays what loaders write to; the layer takes a product that was computed."""
    monkeypatch.setattr(joined_layers, "JOINS_ON", "cpu")
    module = linear()
    base: Any = module.base_layer
    values, parameter = base.weight.clone(), base.weight
    assert can_join(module)
    weights = join(module)
    assert base.weight is parameter
    assert torch.equal(parameter, values)
    assert weights.joined is not None
    assert weights.outputs == (12, 4)
    parameter.fill_(3)
    weights.down_of_slices()[1].fill_(5)
    assert weights.joined[:16].eq(3).all()
    assert weights.joined.view(-1, 8)[-8:].eq(5).all()
    assert not can_join(module), "another layer has this weight, too"

    adapters = LayerAdapters(8, 2, torch.device("cpu"), lora_config=LoRAConfig(max_loras=2, max_lora_rank=8))
    x, computed = torch.randn(3, 8), torch.randn(3, 16)
    method = JoinedLinearMethod(base.quant_method, adapters)
    plain = torch.nn.functional.linear(x, parameter)
    assert torch.equal(method.apply(base, x), plain)
    adapters._begun = Begun(x, None, computed)
    assert method.apply(base, x) is computed
    assert torch.equal(method.apply(base, x.clone()), plain)
    adapters._begun = Begun(x, None)
    assert torch.equal(method.apply(base, x), plain)


def test_layers_that_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a bias, of other outputs than their adapters, of a rank that makes products slow, quantised."""
    assert not can_join(linear())
    monkeypatch.setattr(joined_layers, "JOINS_ON", "cpu")
    assert not any(can_join(one) for one in (linear(bias=True), linear(24), linear(rank=3)))
    quantised = linear()
    quantised.base_layer.quant_method = cast(Any, SimpleNamespace())
    assert not can_join(quantised)
