"""Layers of multi-token prediction of GLM-4.5, Qwen3-Next and Qwen3.5: what they propose, and that no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.draft_load import OPTIONS, STATIC
from tests.engine.draft_load import PROMPTS as MANY
from tests.engine.head_proposals import Proposals, check_proposals
from tests.engine.mtp_models import MTP_FAMILIES, PlainMtp, make_mtp
from tests.engine.serving import Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines

NUM_DRAFTS = 3
MAX_TOKENS = 24
# around a block, longer than a step, and with a common beginning
PROMPTS = [MANY[1], *MANY[3:9]]
BUCKETS = {"graphs": {**STATIC["graphs"], "max_graphs": 8, "max_shared_blocks": 16}}


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_layers_of_multi_token_prediction(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decodes of many requests at once; every draft is the plain computation's. Then in a cache that is too
    small for all. covers: A3 A6"""
    pair = make_mtp(tmp_path, family)
    with Engine(pair.target, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, MAX_TOKENS)
    plain = PlainMtp(pair, family)
    with Engine(pair.target, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        with monkeypatch.context() as patch:
            proposals = Proposals(engine, patch)
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, plain, NUM_DRAFTS)
        engine.check_idle()
    # room for the longest request alone: the decodes of several outgrow it
    options = {**OPTIONS, "max_model_len": 147, "num_gpu_blocks_override": 11}
    with Engine(pair.target, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        with monkeypatch.context() as patch:
            proposals = Proposals(engine, patch)
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, plain, NUM_DRAFTS)
        assert engine.preemptions > 0


def test_a_layer_of_multi_token_prediction_in_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with states, whose next step is planned while one runs; nothing is new after the warm-up."""
    pair = make_mtp(tmp_path, "qwen3_next")
    with Engine(pair.target, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, MAX_TOKENS)
    ucm = {**BUCKETS, "scheduler": {"async_scheduling": True}}
    options = {**OPTIONS, "async_scheduling": True}
    with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, PlainMtp(pair, "qwen3_next"), NUM_DRAFTS)
        assert engine.runner.static is not None
        assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()
