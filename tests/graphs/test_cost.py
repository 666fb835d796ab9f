"""The cost model: monotone, vectorised, and the roofline of known sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B, ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm_tools.buckets.expert_codes import CodeSpec
from vllm_gaudi_ucm_tools.buckets.held_weights import held_bytes

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
    # one size for each layer, as Gemma 3n has it
    assert ModelSpec.from_hf_config({**LLAMA_CONFIG, "intermediate_size": [16384, 12288] * 16}) == LLAMA_8B
    assert LLAMA_8B.kv_bytes_per_token == 131072
    assert LLAMA_8B.weight_bytes / 2 == pytest.approx(7.5e9, rel=0.01)
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    assert ModelSpec.from_hf_config(gpt2) == ModelSpec(12, 768, 3072, 12, 12, 64, 50257, 2, 2)


def test_three_layers_of_four_have_chunks() -> None:
    """Llama 4: with rotary positions; dense layers have another size than experts."""
    llama4 = {**LLAMA_CONFIG, "model_type": "llama4_text", "attention_chunk_size": 8192, "intermediate_size_mlp": 16384}
    for types in ({}, {"no_rope_layers": [1, 1, 1, 0] * 8}, {"no_rope_layers": []}):
        model = ModelSpec.from_hf_config({**llama4, **types})
        assert (model.window_layers, model.window, model.intermediate) == (24, 8192, 16384)
    assert model.block_layers == 8


def test_a_latent_is_cached_once_for_all_heads() -> None:
    """DeepSeek V2 Lite's attention: 27 layers of 512 + 64 elements; two devices keep the same ones."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = {**LLAMA_CONFIG, "model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16, **sizes}
    model = ModelSpec.from_hf_config({**config, "hidden_size": 2048, "q_lora_rank": None})
    assert model.kv_bytes_per_token == model.shard(2).kv_bytes_per_token == 27 * 576 * 2
    attention = model.layer_weights - 3 * 2048 * model.intermediate
    assert attention == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    # others cache what they make of theirs
    assert ModelSpec.from_hf_config({**config, "model_type": "minicpm3", "num_key_value_heads": 16}).latent is None
    decode = Bucket("--u", 1, 0, 1000, 0)
    costs = [CostModel(DEVICES["h200"], one, 64) for one in (model, replace(model, latent=None, kv_heads=16))]
    assert costs[0].forward(decode) < costs[1].forward(decode) / 5


def test_blocks_and_states_of_a_hybrid() -> None:
    """Granite 4.0-h: 36 layers with states of 0.8 MB for a request, 4 with keys and values."""
    mamba = {"n_heads": 48, "n_groups": 1, "d_state": 128, "d_head": 64, "d_conv": 4}
    config = {**LLAMA_CONFIG, "num_hidden_layers": 40, "model_type": "granitemoehybrid"}
    config["layer_types"] = (["linear_attention"] * 9 + ["full_attention"]) * 4
    spec = ModelSpec.from_hf_config(config | {f"mamba_{name}": value for name, value in mamba.items()})
    assert spec.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2
    each = 2 * (3 * (48 * 64 + 2 * 128) + 48 * 64 * 128)
    assert spec.states is not None
    assert spec.states.bytes_of(10, drafts=2) == 36 * each * 32
    assert spec.states.bytes_of(10, kept=5) == 36 * each * 17
    half = spec.shard(2, 2).states
    assert half is not None
    assert (half.layers, half.attending, half.bytes_each) == (18, 2, each // 2)


def test_a_device_has_its_part_of_a_model() -> None:
    """Sizes that all parts make up are those of the whole, but for KV heads that several devices keep."""
    part = LLAMA_8B.shard(4, 2)
    assert part == ModelSpec(16, 4096, 3584, 8, 2, 128, 32064, tensor=4)
    assert 8 * part.weight_bytes == LLAMA_8B.weight_bytes + 4096 * 128256 * 2  # each stage is counted with a head
    assert 8 * part.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token
    assert LLAMA_8B.shard(16).kv_heads == 1
    assert LLAMA_8B.shard(1) == LLAMA_8B
    for tensor, pipeline, option in ((3, 1, "tensor"), (0, 1, "tensor"), (64, 1, "tensor"), (1, 33, "pipeline")):
        with pytest.raises(ValueError, match=f"--{option}-parallel-size is"):
            LLAMA_8B.shard(tensor, pipeline)


def test_devices_that_share_layers_add_up_their_results() -> None:
    """Around a ring, twice a layer: each sends 2 (n - 1) / n of the hidden states."""
    device = DEVICES["gaudi3"]
    alone, cost = CostModel(device, LLAMA_8B, 128), CostModel(device, LLAMA_8B.shard(4), 128)
    assert alone.reduction_seconds(100) == 0
    sent = 1.5 * 100 * 4096 * 2
    assert cost.reduction_seconds(100) == pytest.approx(64 * (device.launch_seconds + sent / device.link))
    # a long step is faster on four devices than on one, by less than four times
    prompt = Bucket("c--", 8192, 0, 0, 1)
    assert 2 < alone.step(prompt) / cost.step(prompt) < 4
    # of a step of one row the launches of reductions are most
    assert cost.reduction_seconds(1) / cost.forward(Bucket("--u", 1, 0, 8, 0)) > 0.3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"torch_dtype": "int4"}, "dtype"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"num_local_experts": "8", "num_experts_per_tok": 2}, "num_local_experts"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most the 8"),
    ],
)
def test_a_config_without_cost_model_names_the_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelSpec.from_hf_config({**LLAMA_CONFIG, **change})


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gaudi2, gaudi3, h200, cpu"):
        device_spec("gaudi9")


# Qwen3-30B-A3B
A3B = {
    **LLAMA_CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_a_mixture_keeps_all_experts_and_reads_some() -> None:
    """30 billion weights; a row reads 8 of 128 experts, many rows all of them; the embedding is no part of either."""
    model = ModelSpec.from_hf_config(A3B)
    assert model.weight_bytes / model.dtype_bytes == pytest.approx(30.2e9, rel=0.01)
    cost = CostModel(DEVICES["h200"], model, 128)
    one, few, many = (cost.forward(Bucket("--u", rows, 0, rows, 0)) for rows in (1, 16, 1024))
    active = 48 * (2048 * 128 * 72 + 8 * 3 * 2048 * 768) * 2 / 4.8e12
    assert one == pytest.approx(active, rel=0.1)
    assert 5 * one < few < 11 * one
    assert many > 0.9 * model.weight_bytes / 4.8e12
    # on two devices half of everything but attention of KV heads, and the head
    assert model.shard(2).weight_bytes == pytest.approx(model.weight_bytes / 2, rel=0.01)
    assert model.shard(1, 2).weight_bytes == pytest.approx(model.weight_bytes / 2, rel=0.02)


# gpt-oss-20b
GPT_OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}


def with_codes(config: dict[str, Any]) -> tuple[ModelSpec, CodeSpec | None]:
    """A model, and the codes of its experts."""
    model = ModelSpec.from_hf_config(config)
    return model, CodeSpec.of_experts(config, model.layers)


def test_quantised_experts_stay_codes_on_a_gpu() -> None:
    """Elsewhere they are written out, two bytes for each weight. 90 groups of 32 are 23 on each of four devices, of
    which the last pads two."""
    model, codes = with_codes(GPT_OSS)
    assert model.weight_bytes == pytest.approx(2 * 20.3e9, rel=0.01)
    experts = 24 * 32 * 3 * 2880 * 2880
    held = model.weight_bytes - experts * 2 + experts // 2 + experts // 32 * 4
    for device, kept, expected in (
        ("h200", "auto", held),
        ("h200", "plain", model.weight_bytes),
        ("cpu", "auto", model.weight_bytes),
        ("cpu", "codes", held),
        ("gaudi3", "auto", model.weight_bytes),
    ):
        assert held_bytes(model, codes, device, kept) == expected, (device, kept)
    part = model.shard(4).experts
    assert part is not None
    assert part.inner == 736


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("quantised", "bytes_each"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.47.mlp.experts"]}, 2),
        ({"quant_method": "awq", "group_size": 128}, 0.5 + 8 / 128),
        # groups that no kernel multiplies become plain weights
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, 2),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head", "re:.*mlp.gate$"],
                "config_groups": {
                    "attention": {"targets": ["re:.*self_attn.*"], "weights": {**FP8, "num_bits": 4}},
                    "others": {"targets": ["Linear"], "weights": FP8},
                },
            },
            1,
        ),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*experts.*"]}, 2),
        ({"quant_method": "bitsandbytes"}, 2),
        (None, 2),
    ],
)
def test_bytes_of_quantised_experts(quantised: dict[str, Any] | None, bytes_each: float) -> None:
    """On a GPU; a scale for each output is a thousandth."""
    model, codes = with_codes({**A3B, "quantization_config": quantised})
    experts = 48 * 128 * 3 * 2048 * 768
    whole = held_bytes(model, codes, "h200")
    found = whole - model.weight_bytes + 2 * experts
    assert found == pytest.approx(bytes_each * experts, rel=0.005)
    assert held_bytes(model.shard(2), codes, "h200") == pytest.approx(whole / 2, rel=0.01)


def per_output(kind: str) -> dict[str, Any]:
    weights = {**FP8, "type": kind}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
    }


OUTPUTS = 48 * 128 * (2 * 768 + 2048)


@pytest.mark.parametrize(
    ("quantised", "found"),
    [
        (per_output("float"), OUTPUTS * 4),
        ({"quant_method": "fp8"}, OUTPUTS * 4),
        (None, 48 * 128 * 3 * 2048 * 768),
        (per_output("int"), "8-bit floats"),
        ({"quant_method": "mxfp4"}, "8-bit floats"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "8-bit floats"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "one scale for each matrix or output"),
    ],
)
@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_codes_on_a_gaudi(device: str, quantised: dict[str, Any] | None, found: int | str) -> None:
    """8-bit floats with a scale per matrix or output, as the server takes them. found: bytes beside one of each weight,
    or what is refused."""
    model, codes = with_codes({**A3B, "quantization_config": quantised})
    experts = 48 * 128 * 3 * 2048 * 768
    assert held_bytes(model, codes, device) == model.weight_bytes
    if isinstance(found, int):
        assert held_bytes(model, codes, device, "codes") == model.weight_bytes - experts + found
        return
    expected = f"--quantised-experts is 'codes', but on a {device} the product with codes takes {found}; take 'auto' or"
    with pytest.raises(ValueError, match=re.escape(expected)):
        held_bytes(model, codes, device, "codes")


@pytest.mark.parametrize(
    ("change", "layers", "shared"),
    [
        ({"mlp_only_layers": [0, 3]}, 46, 0),
        ({"decoder_sparse_step": 2}, 24, 0),
        ({"decoder_sparse_step": None, "first_k_dense_replace": 3}, 45, 0),
        ({"shared_expert_intermediate_size": 5632}, 48, 5632),
        ({"n_shared_experts": 2}, 48, 1536),
        ({"decoder_sparse_step": None, "moe_layer_freq": [0, 1]}, 48, 0),
        ({"decoder_sparse_step": None, "interleave_moe_layer_step": 2, "model_type": "llama4_text"}, 24, 768),
        # every layer has a plain MLP, too
        ({"num_experts_per_tok": None, "top_k_experts": 8, "model_type": "gemma4_text"}, 48, 6144),
        # Hunyuan has a number for each layer
        ({"num_experts_per_tok": None, "moe_topk": [8] * 48, "moe_intermediate_size": [768] * 48}, 48, 0),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], layers: int, shared: int) -> None:
    model = ModelSpec.from_hf_config({**A3B, **change})
    assert model.experts is not None
    assert (model.experts.layers, model.experts.shared) == (layers, shared)
