"""Which layers of a model are packed, and which get a compact copy too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_gaudi_ucm.layers.cpu import packed_weights
from vllm_gaudi_ucm.layers.cpu.packed_weights import PackedLayers, PackedLinearMethod, pack_linear_layers


class Layer(LinearBase):
    """A linear layer of vLLM without its tensor-parallel set-up."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


@pytest.mark.parametrize(("compact", "found"), [(True, 1), (False, 0)])
def test_compact_copies_are_made_where_asked_for_and_possible(compact: bool, found: int) -> None:
    """The option's effect: a layer of bfloat16 values gets a copy, one of other values does not."""
    values = torch.randn(64, 64)
    model = nn.Sequential(Layer(values.bfloat16().float()), Layer(values), nn.Linear(64, 64))
    expected = [values.bfloat16().float().clone(), values.clone()]
    has_native = packed_weights.pack(expected[0].clone(), compact=True).compact is not None
    assert pack_linear_layers(model, compact) == PackedLayers(2, found * has_native)
    x = torch.randn(3, 64)
    for layer, weight in zip(model, expected, strict=False):
        assert isinstance(layer.quant_method, PackedLinearMethod)
        assert not layer.weight.numel(), "the plain weight is given back"
        torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ weight.T, rtol=1e-4, atol=1e-4)
