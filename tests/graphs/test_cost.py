"""The cost model: monotone, vectorised, and the roofline of known sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B, ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

BLOCKS = st.integers(0, 9000)
SIZES = st.tuples(st.booleans(), st.integers(1, 9000), BLOCKS, BLOCKS, BLOCKS, st.integers(1, 40))
LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@given(SIZES, SIZES, st.sampled_from(sorted(DEVICES)))
def test_more_never_costs_less(a: tuple[int, ...], b: tuple[int, ...], device: str) -> None:
    cost = CostModel(DEVICES[device], LLAMA_8B, 128)
    join = [max(x, y) for x, y in zip(a, b, strict=True)]
    assert cost.forward_seconds(*join) >= cost.forward_seconds(*a)
    assert cost.logits_seconds(join[1]) >= cost.logits_seconds(a[1]) > 0


def test_a_decode_of_one_request_reads_the_weights_once() -> None:
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
    weights = LLAMA_8B.layers * LLAMA_8B.layer_weights * 2 / 2.45e12
    assert cost.forward(Bucket("--u", 1, 0, 1, 1)) == pytest.approx(weights, rel=0.02)


def test_a_long_prompt_is_bound_by_flops() -> None:
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
    flops = 2 * 8192 * LLAMA_8B.layers * LLAMA_8B.layer_weights
    attention = LLAMA_8B.layers * 4 * 4096 * 8192 * (8192 + 512) / 2
    assert cost.forward(Bucket("c--", 8192, 0, 0, 0)) == pytest.approx((flops + attention) / 432e12, rel=0.01)


def test_packed_prompts_in_a_bucket_that_bounds_prompt_tiles_cost_what_one_of_them_needs() -> None:
    """Of as many rows; without attention among the new tokens the cost would be that of its linear layers."""
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
    whole, packed = (cost.forward(Bucket("c--", 8192, 0, 0, 0, 0, tiles)) for tiles in (ALL_TILES, 2))
    pairs = 8192 * ((8192 + 512) / 2 - 512)
    assert whole - packed == pytest.approx(LLAMA_8B.layers * 4 * 4096 * pairs / 432e12, rel=1e-6)
    assert cost.forward(Bucket("--u", 9, 0, 9, 0, 0, 2)) == cost.forward(Bucket("--u", 9, 0, 9, 0))


def test_arrays_and_single_steps_agree_and_no_logits_cost_nothing() -> None:
    cost = CostModel(DEVICES["h200"], LLAMA_8B, 128)
    buckets = [Bucket("csu", 70, 9, 400, 20), Bucket("--u", 1, 0, 8, 1), Bucket("c--", 2000, 0, 0, 0)]
    buckets.append(Bucket("-su", 20, 3, 40, 0, 70))
    columns = np.array([("c" in b.phase, *b.forward.sizes) for b in buckets]).T
    assert cost.forward_seconds(*columns).tolist() == [cost.forward(bucket) for bucket in buckets]
    assert cost.step(buckets[2]) == cost.forward(buckets[2])


def test_a_selected_block_costs_what_a_unique_one_does_and_its_scores() -> None:
    """And the same beside any other size; without a selected part nothing changes."""
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
    alone = cost.selected_seconds(500)
    unique = cost.forward(Bucket("--u", 4, 0, 500, 0)) - cost.forward(Bucket("---", 4, 0, 0, 0))
    assert unique < alone < 1.15 * unique
    for bucket in (Bucket("--u", 4, 0, 9, 0), Bucket("csu", 2000, 90, 800, 0)):
        more = cost.forward(bucket._replace(selected_blocks=500)) - cost.forward(bucket)
        assert more == pytest.approx(alone, rel=1e-9)
    assert cost.selected_seconds(0) == 0.0


def test_figures_of_a_model_come_from_its_config() -> None:
    assert ModelSpec.from_hf_config(LLAMA_CONFIG) == LLAMA_8B
    assert LLAMA_8B.kv_bytes_per_token == 131072
    assert LLAMA_8B.weight_bytes / 2 == pytest.approx(7.5e9, rel=0.01)
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    assert ModelSpec.from_hf_config(gpt2) == ModelSpec(12, 768, 3072, 12, 12, 64, 50257, 2, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"torch_dtype": "int4"}, "dtype"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_a_config_without_cost_model_names_the_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelSpec.from_hf_config({**LLAMA_CONFIG, **change})


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gaudi2, gaudi3, h200, cpu"):
        device_spec("gaudi9")
