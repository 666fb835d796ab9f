"""Layers of multi-token prediction (MTP) of five families: what they propose, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.draft_load import OPTIONS, STATIC
from tests.engine.draft_load import PROMPTS as MANY
from tests.engine.head_models import Pair
from tests.engine.head_proposals import Proposals, check_proposals
from tests.engine.heads_on_card import NUM_DRAFTS, check_on_card
from tests.engine.mtp_models import CHOOSING, MTP_FAMILIES, PlainMtp, make_mtp
from tests.engine.quantised_models import Quantise, compressed_tensors, fp8_block, write_quantised
from tests.engine.serving import NEAR_TIE, Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines

MAX_TOKENS = 24
# around a block, longer than a step, and with a common beginning
PROMPTS = [MANY[1], *MANY[3:9]]
BUCKETS = {"graphs": {**STATIC["graphs"], "max_graphs": 8, "max_shared_blocks": 16}}
# a token whose score is near another's may be chosen in its place
NEAR = {family: 0.02 if family in CHOOSING else NEAR_TIE for family in MTP_FAMILIES}


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_layers_of_multi_token_prediction(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and cached prefixes of many requests at once; every draft is the plain computation's. Then in a
    cache that is too small for all. covers: A3 A6"""
    pair = make_mtp(tmp_path, family)
    with Engine(pair.target, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, MAX_TOKENS)
    plain = PlainMtp(pair, family)
    with Engine(pair.target, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        with monkeypatch.context() as patch:
            proposals = Proposals(engine, patch)
            for _ in range(2):
                assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, plain, NUM_DRAFTS, NEAR[family])
        engine.check_idle()
    # room for the longest request alone: the decodes of several outgrow it
    options = {**OPTIONS, "max_model_len": 147, "num_gpu_blocks_override": 11}
    with Engine(pair.target, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        with monkeypatch.context() as patch:
            proposals = Proposals(engine, patch)
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, plain, NUM_DRAFTS, NEAR[family])
        assert engine.preemptions > 0


@pytest.mark.parametrize("family", ["qwen3_next", *CHOOSING])
def test_a_layer_of_multi_token_prediction_in_buckets(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has states, or its rows choose tokens. The next step is planned while one runs, and nothing is new
    after the warm-up.
    """
    pair = make_mtp(tmp_path, family)
    with Engine(pair.target, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, MAX_TOKENS)
    ucm = {**BUCKETS, "scheduler": {"async_scheduling": True}}
    options = {**OPTIONS, "async_scheduling": True}
    with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        for _ in range(2):
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, PlainMtp(pair, family), NUM_DRAFTS, NEAR[family])
        assert engine.runner.static is not None
        assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[Answer]]:
    pair = make_mtp(tmp_path_factory.mktemp("choosing"), "glm_moe_dsa")
    with Engine(pair.target, **OPTIONS) as engine:
        return pair, engine.greedy(PROMPTS, MAX_TOKENS)


def test_a_layer_chooses_tokens(choosing: tuple[Pair, list[Answer]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that attends to whole contexts drafts other tokens."""
    pair, expected = choosing
    with Engine(pair.target, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
    with pytest.raises(AssertionError):
        check_proposals(proposals, PlainMtp(pair, "glm_moe_dsa", chosen=4096), NUM_DRAFTS, NEAR["glm_moe_dsa"])


WITH_A_CHOICE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "swaps": ({"preemption": {"mode": "swap", "host_memory": 4 << 20}}, {"num_gpu_blocks_override": 19}),
    "partial hits and compaction": ({"kv_cache": {"partial_hits": True, "compaction": True}}, {}),
    "two devices": ({"distributed": {"check_ranks": True}}, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_what_goes_with_a_layer_that_chooses(name: str, choosing: tuple[Pair, list[Answer]]) -> None:
    """No answer changes."""
    pair, expected = choosing
    ucm, changes = WITH_A_CHOICE[name]
    options = {**OPTIONS, **changes}
    with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        for _ in range(2):
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        assert engine.preemptions or "num_gpu_blocks_override" not in changes
        if "tensor_parallel_size" not in changes:
            engine.check_idle()


_SIZES = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "index_head_dim": 64,
    "index_n_heads": 8,
}
_PLAIN = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("mlp.gate", "self_attn.indexer.wq_b")]
# a family, what its configuration has in addition, and a format
QUANTISED: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], Callable[[str], Quantise | None]]]] = {
    "fp8 blocks": (
        "deepseek_v32",
        _SIZES,
        (
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "modules_to_not_convert": _PLAIN,
            },
            lambda _: fp8_block("weight_scale_inv"),
        ),
    ),
    "compressed-tensors": (
        "glm4_moe",
        {},
        compressed_tensors({r"model\.layers\.\d+\.(self_attn|mlp)\.(?!gate$).*": "fp8 per channel"}),
    ),
}


@pytest.mark.parametrize("scheme", QUANTISED)
def test_a_layer_with_quantised_weights(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint has them in the model's format, and names the layers that are plain."""
    family, changes, written = QUANTISED[scheme]
    pair = make_mtp(tmp_path, family, **changes)
    quantised, meant = write_quantised(pair.target, tmp_path, *written)
    with Engine(quantised, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, MAX_TOKENS)
    with Engine(quantised, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, PlainMtp(Pair("mtp", meant, None), family), NUM_DRAFTS, NEAR[family])


@pytest.mark.parametrize("mode", ["capture", "compile"])
def test_on_the_simulated_card(tmp_path: Path, mode: str) -> None:
    """Layers that choose tokens, in HPU graphs and as compiled recipes. covers: B5 B7"""
    check_on_card({family: make_mtp(tmp_path, family) for family in CHOOSING}, tmp_path, mode)
