"""Models with a state in some layers give the tokens of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.hybrids import HYBRIDS, hybrid_prompts, make_hybrid
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines

LENGTH = 64
# prompts come in chunks of any length
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256}
# room for few requests
FEW_BLOCKS = {"num_gpu_blocks_override": 24}
BUCKETS = {"graphs": {"mode": "eager", "max_graphs": 6}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrids"), request.param)


@pytest.fixture(scope="module")
def served(model: Path) -> list[Answer]:
    with Engine(model, **OPTIONS) as engine:
        answers = engine.greedy(hybrid_prompts(), LENGTH)
        engine.check_idle()
        again = engine.greedy(hybrid_prompts()[-1:], 8)
    assert again[0].cached_tokens == 0
    return answers


def test_greedy_tokens_are_those_of_transformers(model: Path, served: list[Answer]) -> None:
    ReferenceModel(model).assert_greedy(hybrid_prompts(), served)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_a_preempted_request_begins_again(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(model, ucm, **OPTIONS, **FEW_BLOCKS) as engine:
        found = engine.greedy(hybrid_prompts(), LENGTH)
        assert engine.preemptions > 0
        engine.check_idle()
    assert_same(found, served)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_rejected_drafts_are_rolled_back(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(model, ucm, **OPTIONS, speculative_config=NGRAM) as engine:
        found = engine.greedy(hybrid_prompts(), LENGTH)
    assert_same(found, served)


def test_a_sparse_method_chooses_in_the_layers_with_attention(model: Path, served: list[Answer]) -> None:
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}
    with Engine(model, ucm, **OPTIONS) as engine:
        assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)
