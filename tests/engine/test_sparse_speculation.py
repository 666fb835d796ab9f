"""Drafts that are verified under a sparse method: one choice for all rows of a request, kept when some are rejected."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB
from tests.speculation.oracle_proposer import OracleProposer
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(12)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (3, 50, 120, 190)]
MAX_TOKENS = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 70,
}
STATIC = {"mode": "eager", "max_graphs": 20, "warm_up": "full"}
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
LOCK = {"checkpoint_interval": 4, "lock_duration": 12}


def ucm(method: str, ratio: float, static: bool, **more: Any) -> dict[str, Any]:
    options = {**WINDOWS, "sparse_ratio": ratio, **(LOCK if method == "KVStar" else {})}
    config = {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}, **more}
    return {**config, "graphs": STATIC} if static else config


def speculate(engine: Engine, texts: list[Answer], seed: int, wrong: float) -> list[Answer]:
    """Answers with drafts that follow `texts` for a random while."""
    follow = {tuple(prompt): [*text.tokens, 3, 3, 3] for prompt, text in zip(PROMPTS, texts, strict=True)}
    engine.runner.parts.drafts.proposer = OracleProposer(follow, random.Random(seed), wrong)
    answers = engine.staggered(PROMPTS, [0, 1, 3, 5], MAX_TOKENS)
    engine.check_idle()
    return answers


@pytest.fixture(scope="module")
def dense(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.staggered(PROMPTS, [0, 1, 3, 5], MAX_TOKENS)


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_with_all_blocks_drafts_change_no_token(
    tiny_llama: Path, dense: list[Answer], method: str, static: bool, tmp_path: Path
) -> None:
    """covers: C16 C20. Right drafts, wrong ones, and blocks that fill up with both."""
    log = tmp_path / "phases.jsonl"
    config = ucm(method, 1.0, static, phase_log=str(log))
    with Engine(tiny_llama, config, **OPTIONS, speculative_config=NGRAM) as engine:
        for seed in range(2):
            assert_same(speculate(engine, dense, seed, wrong=0.5), dense)
    # several rows with a choice
    assert any(record.sparse and record.bucket.phase[0] == "c" for record in read_phase_log(log)[1])


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_partial_acceptance_keeps_the_lock(tiny_llama: Path, dense: list[Answer], static: bool) -> None:
    """covers: C17 C20. A lock that every rejected draft ended would choose anew in nearly every step."""
    with Engine(tiny_llama, ucm("KVStar", 0.4, static), **OPTIONS, speculative_config=NGRAM) as engine:
        speculate(engine, dense, 3, wrong=0.9)
        sparse = engine.runner.parts.sparse
        assert sparse is not None
        assert sparse.state is not None
        modes = sparse.state.totals.modes
    total = sum(modes.values())
    # of 12 steps 1 chooses, 2 check and 9 use what is stored; the last lock of a request is cut short
    assert total > 40
    assert modes[SelectionMode.SELECT] <= total / 12 + len(PROMPTS)
    assert total / 6 < modes[SelectionMode.CHECK] + len(PROMPTS)
    assert modes[SelectionMode.REUSE] >= 0.6 * total
