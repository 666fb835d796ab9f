"""Two engines behind one front serve models with a state in some layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.engine_group import serve_by_engines
from tests.engine.hybrids import hybrid_prompts, make_hybrid
from tests.engine.serving import Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines

LENGTH = 16
OPTIONS = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256}


def test_each_engine_gives_the_tokens_of_one_alone(tmp_path: Path) -> None:
    """The engines of a model with experts take their steps together: one of them has no request at first."""
    model, prompts = make_hybrid(tmp_path, "granitemoehybrid"), hybrid_prompts()
    with Engine(model, **OPTIONS) as engine:
        expected = engine.greedy(prompts, LENGTH)
    turns = serve_by_engines(model, {}, prompts, LENGTH, 2, **OPTIONS)
    assert len(turns) == 3
    for found in turns:
        assert_same(found, expected)
