"""Heads that draft from the model's hidden states: what they propose, and that no token changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engine.draft_load import MAX_TOKENS, OPTIONS, PROMPTS, STATIC
from tests.engine.head_models import Pair, PlainHead, make_pair
from tests.engine.head_proposals import Proposals, check_proposals
from tests.engine.heads_on_card import NUM_DRAFTS, check_on_card
from tests.engine.serving import Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines

METHODS = ("eagle", "eagle3", "mtp")
KINDS = {"true_shapes": {}, "static": {"graphs": {**STATIC["graphs"], "max_shared_blocks": 16}}}


@pytest.fixture(scope="module", params=METHODS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[Answer]:
    with Engine(pair.target, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, MAX_TOKENS)


def test_proposals_are_those_of_a_plain_computation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other, a chunked prompt among them, and again from the prefix cache: every logit of every
    pass."""
    plain = PlainHead(pair)
    with Engine(pair.target, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        for prompt in (PROMPTS[6], PROMPTS[6], PROMPTS[2], PROMPTS[0]):
            first = len(proposals.logits)
            engine.greedy([prompt], 6)
            passes = iter(proposals.logits[first:])
            assert len(proposals.found) >= 2
            for text, found in proposals.found:
                _, logits = plain.drafts(text, len(found))
                got = torch.cat([next(passes)[:1] for _ in found]).cpu()
                if pair.method == "eagle3":
                    tokens = plain.tensors["d2t"] + torch.arange(len(plain.tensors["d2t"]))
                    assert torch.isneginf(got).sum() == got.numel() - got.shape[0] * len(tokens)
                    got = got[:, tokens]
                torch.testing.assert_close(got, logits, atol=2e-3, rtol=1e-3)
            proposals.found.clear()
        engine.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_change_no_token(pair: Pair, expected: list[Answer], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and cached prefixes of many requests at once, in parts of steps at static shapes; nothing is
    compiled after the warm-up. covers: A2 A3 A6 B5"""
    with Engine(pair.target, KINDS[kind], **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        for _ in range(2):
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, PlainHead(pair), NUM_DRAFTS)
        if engine.runner.static is not None:
            assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()


@pytest.mark.usefixtures("contract")
def test_preempted_requests_draft_again(pair: Pair, expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is far too small for all. covers: A3 A6 A7"""
    options = {**OPTIONS, "num_gpu_blocks_override": 19}
    with Engine(pair.target, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        proposals = Proposals(engine, monkeypatch)
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, PlainHead(pair), NUM_DRAFTS)
        assert engine.preemptions > 0
        engine.check_idle()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[Answer]]:
    pair = make_pair(tmp_path_factory.mktemp("quiet"), "eagle", quiet=True)
    with Engine(pair.target, **OPTIONS) as engine:
        return pair, engine.greedy(PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_that_of_a_plain_computation(
    quiet: tuple[Pair, list[Answer]], kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is often right: an engine takes exactly the verifications that its drafts explain."""
    pair, expected = quiet
    plain, wanted = PlainHead(pair), 0
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        known = 1
        while known < MAX_TOKENS:
            count = min(NUM_DRAFTS, MAX_TOKENS - known - 1)
            drafts = plain.drafts([*prompt, *answer.tokens[:known]], count)[0] if count else []
            rest = answer.tokens[known:]
            accepted = next((i for i, draft in enumerate(drafts) if draft != rest[i]), len(drafts))
            known += accepted + 1
            wanted += 1
    steps = len(PROMPTS) * (MAX_TOKENS - 1)
    assert 0.3 * steps < wanted < 0.8 * steps
    ucm = {**KINDS[kind], "scheduler": {"async_scheduling": ahead}}
    options = {**OPTIONS, "async_scheduling": ahead, "enable_prefix_caching": False}
    with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        assert (engine.runner.parts.ahead is not None) == ahead
        proposals = Proposals(engine, monkeypatch)
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        check_proposals(proposals, plain, NUM_DRAFTS)
        # a step that is scheduled ahead may hold a request that has just ended
        over = proposals.yielded - wanted - len(PROMPTS)
        assert 0 <= over <= (len(PROMPTS) if ahead else 0)
        engine.check_idle()


def test_random_arrivals(quiet: tuple[Pair, list[Answer]]) -> None:
    """Chunks of prompts in the same steps as verifications, from a prefix cache that fills."""
    pair, expected = quiet
    rng = random.Random(3)
    with Engine(pair.target, **OPTIONS, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        for _ in range(3):
            arrivals = [rng.randrange(12) for _ in PROMPTS]
            assert_same(engine.staggered(PROMPTS, arrivals, MAX_TOKENS), expected)
        engine.check_idle()


def test_a_lock_of_kvstar_over_drafts_of_a_head(quiet: tuple[Pair, list[Answer]]) -> None:
    """With a choice of all blocks, and the next step planned while one runs."""
    pair, expected = quiet
    ucm = {
        "ucm_sparse_method": "KVStar",
        "ucm_sparse_config": {"KVStar": {"sparse_ratio": 1.0}},
        "scheduler": {"async_scheduling": True},
    }
    options = {**OPTIONS, "async_scheduling": True}
    with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(NUM_DRAFTS)) as engine:
        assert engine.runner.parts.sparse is not None
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        engine.check_idle()


@pytest.mark.parametrize(("mode", "methods"), [("capture", ("eagle",)), ("compile", METHODS)])
def test_on_the_simulated_card(tmp_path: Path, mode: str, methods: tuple[str, ...]) -> None:
    """In HPU graphs, and as compiled recipes: once warm, no pass of a head compiles anything. covers: B5 B7"""
    pairs = {method: make_pair(tmp_path / method, method) for method in methods}
    check_on_card(pairs, tmp_path, mode)
