"""Asynchronous scheduling with drafts and a sparse method: workers decide what is sparse once tokens are known, and no
token changes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.async_traffic import (
    GROWING,
    MIX,
    Arrival,
    Watched,
    any_traffic,
    assert_equal,
    params,
    serve,
    start,
)
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.speculation.proposer import SampledStep

pytestmark = pytest.mark.slow  # starts engines

NUM_DRAFTS = 3
STATIC: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 3, "warm_up": "full"}}
METHODS: dict[str, dict[str, Any]] = {
    "GSA": {"reuse_steps": 3},
    "KVStar": {"checkpoint_interval": 3, "lock_duration": 9, "update_threshold": 1},
}
WINDOWS = {"sparse_steps": "always", "min_tokens": 40, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 1}
ASKED = [
    MIX[0],
    Arrival(1, MIX[1].prompt, params(temperature=1.0, seed=7, max_tokens=40)),
    Arrival(2, MIX[2].prompt, params(max_tokens=50, logprobs=2)),
    # dense, and sparse from its 40th token on
    Arrival(3, [9] * 30, params(max_tokens=50)),
    Arrival(4, [7] * 5 + MIX[2].prompt, params(max_tokens=50)),
    Arrival(5, MIX[4].prompt, params(max_tokens=40), aborted_at=7),
    Arrival(6, MIX[5].prompt, params(max_tokens=40, stop_token_ids=list(range(0, 4000, 9)), ignore_eos=False)),
]


class Fixed:
    """See DraftProposer: how many drafts a request gets, and which are wrong, follow from its tokens alone.

    texts: prompt -> the tokens that follow it.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._texts = texts

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts = []
        for request, most in zip(step.requests, step.wanted.tolist(), strict=True):
            text, known = self._texts.get(tuple(request.prompt_token_ids), ()), len(request.output_token_ids)
            rng = random.Random(1000 * len(request.prompt_token_ids) + known)
            proposed = list(text[known : known + min(most, rng.randint(0, NUM_DRAFTS))])
            if proposed and rng.random() < 0.5:
                proposed[rng.randrange(len(proposed))] = 5
            drafts.append(proposed)
        return drafts


def ucm(method: str, ratio: float, **more: Any) -> dict[str, Any]:
    options = {**WINDOWS, "sparse_ratio": ratio, **METHODS[method]}
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}, **more}


@pytest.fixture
def drafted(tiny_text_model: Path) -> dict[str, Any]:
    """By the model itself, whose context is whole: what a choice leaves out makes drafts wrong."""
    return {"method": "draft_model", "model": str(tiny_text_model), "num_speculative_tokens": NUM_DRAFTS}


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_synchronous_steps(tiny_text_model: Path, drafted: dict[str, Any], method: str) -> None:
    """Of a tenth of the context, so that another window, lock or budget would give others. covers: C13 C17 C20"""
    found, totals = [], []
    # where a step is static nothing else is decided, and graphs take their time to warm
    engines = [({}, False), ({}, True), (STATIC, True)] if method == "KVStar" else [({}, False), ({}, True)]
    for shapes, is_async in engines:
        with start(tiny_text_model, ucm(method, 0.1, **shapes), is_async, speculative_config=drafted) as engine:
            watched = Watched(engine)
            found.append(watched.serve(ASKED))
            texts = zip(ASKED, found[0][: len(ASKED)], strict=True)
            engine.runner.parts.drafts.proposer = Fixed({tuple(one.prompt): own[0].tokens for one, own in texts})
            found[-1] += watched.serve(ASKED)
            sparse = engine.runner.parts.sparse
            assert sparse is not None
            assert sparse.state is not None
            totals.append(dict(sparse.state.totals.modes))
            assert 0 < sparse.state.totals.attended_blocks < 0.9 * sparse.state.totals.context_blocks
            assert (watched.queued > 0.8 * watched.schedules) == is_async
    for some in found[1:]:
        assert_equal(some, found[0])
    # every mode was there; a request that ends is computed once more, for nothing
    assert sum(count > 10 for count in totals[0].values()) >= 2
    assert all(0 <= count - totals[0][mode] <= len(found[0]) for some in totals[1:] for mode, count in some.items())


@pytest.mark.usefixtures("contract")
def test_preempted_requests(tiny_text_model: Path, drafted: dict[str, Any]) -> None:
    """Under a lock, in a cache that is too small, while blocks move and are copied. Of all blocks, because a request
    that was preempted is computed densely again. covers: A7 A8 C17"""
    traffic = [*GROWING, *any_traffic(10, 10)]
    with start(tiny_text_model, {}, is_async=False) as engine:
        wanted = serve(engine, traffic)
    small: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 256}
    moving = {"kv_cache": {"compaction": True, "partial_hits": True}}
    options = ucm("KVStar", 1.0, **moving)
    with start(tiny_text_model, options, is_async=True, speculative_config=drafted, **small) as engine:
        watched = Watched(engine)
        texts = zip(traffic, wanted, strict=True)
        engine.runner.parts.drafts.proposer = Fixed({tuple(one.prompt): own[0].tokens for one, own in texts})
        assert_equal(watched.serve(traffic), wanted)
        assert engine.preemptions > 2
        assert engine.runner.parts.sparse is not None
        assert engine.runner.parts.sparse.state is not None
        assert engine.runner.parts.sparse.state.totals.modes[SelectionMode.REUSE] > 20
