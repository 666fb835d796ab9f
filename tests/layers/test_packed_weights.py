"""Which layers of a model are packed, and which get a compact copy too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import EncoderOnlyAttention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_gaudi_ucm.layers.cpu import packed_weights
from vllm_gaudi_ucm.layers.cpu.packed_weights import (
    EncoderLinearMethod,
    PackedLayers,
    PackedLinearMethod,
    pack_linear_layers,
)
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import pack
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind, Way, set_times


@pytest.fixture(autouse=True)
def no_times() -> Iterator[None]:
    yield
    set_times({})


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


class Attention(EncoderOnlyAttention):
    """The attention of an encoder, which has no weights."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("faster", "is_encoder", "is_large"),
    [("packed", True, False), ("plain", True, False), ("plain", True, True), ("plain", False, False)],
)
def test_an_encoder_keeps_weights_that_torch_multiplies_faster(
    faster: str, is_encoder: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are given: from 32 rows, plain products take a half or twice as long as the others."""
    monkeypatch.setattr(packed_weights, "learn_ways", lambda kinds: None)
    plain = [9.0] * 5 + [{"packed": 2.0, "plain": 0.5}[faster]] * 3
    set_times({Kind.FLOAT32: {way: tuple(plain) if way is Way.PLAIN else (1.0,) * 8 for way in Way}})
    weight = torch.randn(64, 64)
    if pack(weight).panels is None:
        pytest.skip("oneDNN packs in a format of its own here")
    layer = Layer(weight.clone())
    stays = is_encoder and faster == "plain"
    if stays and is_large:
        monkeypatch.setattr(packed_weights, "MOST_COPIES", weight.nbytes - 1)
    found = pack_linear_layers(nn.Sequential(layer, Attention() if is_encoder else nn.Identity()), False)
    assert found == PackedLayers(0 if stays and is_large else 1, 0)
    assert isinstance(layer.quant_method, PackedLinearMethod) != stays
    assert isinstance(layer.quant_method, EncoderLinearMethod) == (stays and not is_large)
    assert bool(layer.weight.numel()) == stays
    for rows in (0, 1, 16, 17, 1000):
        x, bias = torch.randn(rows, 64), torch.randn(64)
        torch.testing.assert_close(layer.quant_method.apply(layer, x, bias), x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    if stays and not is_large:
        # what each number of rows reads: without its values, a weight gives zeros
        layer.weight.data.zero_()
        assert [bool(layer.quant_method.apply(layer, torch.ones(rows, 64)).any()) for rows in (1, 16, 17, 1000)] == [
            True,
            True,
            False,
            False,
        ]
