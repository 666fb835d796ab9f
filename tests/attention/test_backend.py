"""What a layer of vLLM asks of its attention: windows, sinks, soft caps, and keys and values of another layer."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

from tests.ops.batch import Batch, Shape, build
from tests.ops.local import Features, with_features
from tests.ops.oracle import assert_matches, attend
from tests.ops.unified_attention import MIXED
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionBackend, UnifiedAttentionImpl
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.attention_group import step_metadata
from vllm_gaudi_ucm.kv_cache.pair import KvPair
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

BLOCK_SIZE = 4


def forward(layer: UnifiedAttentionImpl, batch: Batch, pair: KvPair, *new: torch.Tensor) -> torch.Tensor:
    metadata = step_metadata(batch.slots, batch.parts, BLOCK_SIZE, "reference", None)
    out = torch.empty_like(batch.query)
    return layer.forward(cast(Any, None), batch.query, *new, pair, metadata, out)


def pair_of(batch: Batch) -> KvPair:
    return KvPair(batch.key_cache.flatten(0, 1).clone(), batch.value_cache.flatten(0, 1).clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_sinks_and_a_cap(dtype: torch.dtype) -> None:
    """Sinks have their values only when the weights are loaded, in the dtype of the model."""
    batch = with_features(build(MIXED, Shape(poison=0.0)), Features(5, cap=2.0, sinks=True), BLOCK_SIZE)
    sinks = torch.nn.Parameter(torch.full((4,), float("nan"), dtype=dtype))
    layer = UnifiedAttentionImpl(4, 16, 0.25, 2, None, 5, logits_soft_cap=2.0, sinks=sinks)
    assert layer.spec == batch.spec
    assert batch.per_head.sinks is not None
    loaded = batch.per_head.sinks.to(dtype)
    sinks.data.copy_(loaded)
    layer.process_weights_after_loading(dtype)
    batch.per_head = batch.per_head._replace(sinks=loaded.float())
    found = forward(layer, batch, pair_of(batch), batch.key, batch.value)
    torch.testing.assert_close(found, attend(batch, "reference"))
    assert_matches(batch, "reference")


def test_chunks() -> None:
    """vLLM tells their length to the class of the backend alone."""
    batch = with_features(build(MIXED, Shape(poison=0.0)), Features(5, chunked=True), BLOCK_SIZE)
    attention = create_chunked_local_attention_backend(UnifiedAttentionBackend, 5).get_impl_cls()
    layer = attention(4, 16, 0.25, 2)
    assert layer.window == Window(5, chunked=True)
    assert layer.spec == batch.spec
    torch.testing.assert_close(
        forward(layer, batch, pair_of(batch), batch.key, batch.value), attend(batch, "reference")
    )
    assert UnifiedAttentionBackend.get_impl_cls() is UnifiedAttentionImpl
    for name, more in (("ALiBi", {"alibi_slopes": [1.0] * 4}), ("a sliding window", {"sliding_window": 5})):
        with pytest.raises(UnsupportedFeatureError, match=f"{name} with chunked local attention"):
            attention(4, 16, 0.25, 2, **more)


def test_a_layer_that_reads_another_ones_cache() -> None:
    """Its own keys and values are not looked at, and nothing is written."""
    batch = build(MIXED, Shape(poison=0.0))
    pair = pair_of(batch)
    expected = forward(UnifiedAttentionImpl(4, 16, 0.25, 2), batch, pair, batch.key, batch.value)
    before = [rows.clone() for rows in pair]
    garbage = torch.full_like(batch.key, float("nan"))
    layer = UnifiedAttentionImpl(4, 16, 0.25, 2, kv_sharing_target_layer_name="model.layers.0.attn")
    torch.testing.assert_close(forward(layer, batch, pair, garbage, garbage), expected)
    for rows, kept in zip(pair, before, strict=True):
        assert torch.equal(rows, kept)
