"""`ucm.kv_cache.compaction`: blocks move while requests are served; no answer changes, and slices stay short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.compaction import MANY, OPTIONS, ROOMY, SMALL, Watched, assert_served
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

COMPACTION: dict[str, Any] = {"kv_cache": {"compaction": True}}
STATIC = {"mode": "eager", "max_graphs": 10, "warm_up": "full"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


ASKED = MANY[:21]


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> Iterator[list[Answer]]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        yield [engine.greedy([one.prompt], one.max_tokens)[0] for one in ASKED]


def serve(model: Path, wanted: Sequence[Answer], ucm: Mapping[str, Any], **options: Any) -> tuple[Watched, int]:
    """Serves all requests, checks that their tokens are those wanted, and returns what was seen and preemptions."""
    with Engine(model, {**COMPACTION, **ucm}, **{**OPTIONS, **options}) as engine:
        watched = Watched(engine)
        assert_served(watched.serve(ASKED), wanted)
        assert watched.moves > 0
        return watched, engine.preemptions


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefix cache": ({}, ROOMY),
    "no prefix cache": ({}, {**ROOMY, "enable_prefix_caching": False}),
    "partial hits": ({"kv_cache": {"compaction": True, "partial_hits": True}}, ROOMY),
    "gathered": ({"attention": {"contiguous_pa": False}}, ROOMY),
    "slices": ({"attention": {"contiguous_pa": True}}, ROOMY),
    "static": ({"graphs": {**STATIC, "recipe_check": "fail"}}, ROOMY),
    "static slices": ({"graphs": STATIC, "attention": {"contiguous_pa": True}}, ROOMY),
    "n-grams": ({}, {**ROOMY, "speculative_config": NGRAM}),
    "no native graphs": ({"cpu": {"native_graphs": False}}, ROOMY),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_without(tiny_llama: Path, wanted: list[Answer], name: str) -> None:
    """covers: A20, A21. Arrivals, ends and aborts; free blocks and the dummy block are NaN."""
    ucm, options = CASES[name]
    serve(tiny_llama, wanted, ucm, **options)


# partial hits are refused without a prefix cache
@pytest.mark.parametrize(
    ("caching", "partial"),
    [(False, False), (True, False), (True, True)],
    ids=["no prefix cache", "prefix cache", "partial hits"],
)
def test_requests_are_preempted(tiny_llama: Path, wanted: list[Answer], partial: bool, caching: bool) -> None:
    """covers: A7, A21. In a cache so small that requests lose their blocks, which others get in other places."""
    ucm = {"kv_cache": {"compaction": True, "partial_hits": partial}}
    _, preemptions = serve(tiny_llama, wanted, ucm, **SMALL, enable_prefix_caching=caching)
    assert preemptions


def test_the_blocks_of_a_draft_model_move_too(tiny_llama: Path, wanted: list[Answer], tmp_path: Path) -> None:
    draft = make_model(tmp_path / "draft", make_config("llama", num_hidden_layers=1), seed=3)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    serve(tiny_llama, wanted, {}, **ROOMY, speculative_config=speculation)


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_summaries_move_with_their_blocks(tiny_llama: Path, wanted: list[Answer], static: bool) -> None:
    """With a budget of all blocks tokens are those of dense attention; with a small one those without compaction."""
    options = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
    graphs = {"graphs": {**STATIC, "max_graphs": 16}} if static else {}
    for ratio in (1.0,) if static else (1.0, 0.3):
        sparse = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**options, "sparse_ratio": ratio}}}
        expected = wanted
        if ratio < 1:
            with Engine(tiny_llama, {**sparse, **graphs}, **OPTIONS, **ROOMY) as engine:
                expected = [engine.greedy([one.prompt], one.max_tokens)[0] for one in ASKED]
        with Engine(tiny_llama, {**COMPACTION, **sparse, **graphs}, **OPTIONS, **ROOMY) as engine:
            watched = Watched(engine)
            found = watched.serve(ASKED)
            assert watched.moves > 0
            assert engine.runner.parts.sparse is not None
            state = engine.runner.parts.sparse.state
            assert state is not None
            state.summaries.check_integrity()
        if ratio == 1:
            assert_served(found, expected)
        else:
            # which blocks of a request compete depends on what is summarised when it joins a batch
            same = [one.tokens == other.tokens for one, other in zip(found, expected, strict=True) if one is not None]
            assert sum(same) >= len(same) - 2


def test_what_is_read_stays_short(tiny_llama: Path) -> None:
    """covers: A20. Once the others have gone, the last requests are at the front: nine tenths of what a slice reads are
    in use."""
    with Engine(tiny_llama, COMPACTION, **OPTIONS, num_gpu_blocks_override=300) as engine:
        watched = Watched(engine)
        watched.serve(MANY)
        assert min(watched.density[-20:]) >= 0.9
        assert min(watched.density) < 0.6


def test_not_beside_connectors_and_memory_mode(tiny_llama: Path) -> None:
    transfer = {
        "kv_connector": "UcmConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": {"kind": "memory"}},
    }
    with pytest.raises(UnsupportedFeatureError, match=r"a KV connector with ucm\.kv_cache\.compaction"):
        Engine(tiny_llama, COMPACTION, kv_transfer_config=transfer)
    with pytest.raises(UnsupportedFeatureError, match=r"a KV connector with ucm\.kv_cache\.compaction"):
        Engine(tiny_llama, COMPACTION, kv_offloading_size=1)
    with pytest.raises(ValueError, match=r"kv_cache\.compaction: found true"):
        Engine(tiny_llama, {**COMPACTION, "ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}})
