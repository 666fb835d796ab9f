"""Dense requests of an engine with a sparse method: nothing that its sparse steps wrote reaches them anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, gsa, transfer
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB

BLOCK = 16
OPTIONS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PROMPT = [3 + (7 * index * index + 13 * index) % (VOCAB - 3) for index in range(100)]
ANSWER, REST = 120, [5, 9, 17]


def dense(engine: Engine, prompt: list[int]) -> Answer:
    params = greedy_params(24)
    params.extra_args = {"ucm_sparse": False}
    return answer_of(engine.generate([prompt], params)[0])


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_a_dense_request_is_dense_from_its_first_token(tiny_llama: Path, tmp_path: Path, method: str) -> None:
    """covers: D2 F2. Its prompt holds an answer that sparse steps have written; and so for a server without a method,
    over the same store, which finds the dense blocks and no other."""
    ucm = gsa(0.1)
    if method == "KVStar":
        ucm = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": ucm["ucm_sparse_config"]["GSA"]}}
    stored = transfer(file_store(tmp_path))
    with Engine(tiny_llama, ucm, kv_transfer_config=stored, **OPTIONS) as engine:
        (sparse,) = engine.greedy([PROMPT], ANSWER)
        prompt = PROMPT + sparse.tokens + REST
        (follower,) = engine.greedy([prompt], 24)
        found = [dense(engine, prompt) for _ in range(2)]
        for _ in range(3):
            engine.step()
        engine.check_idle()
    with Engine(tiny_llama, kv_transfer_config=stored, **OPTIONS) as engine:
        elsewhere = dense(engine, prompt)
    with Engine(tiny_llama, **OPTIONS) as engine:
        expected = dense(engine, prompt)
        (answer,) = engine.greedy([PROMPT], ANSWER)
    assert answer.tokens != sparse.tokens, "the case tells nothing"
    assert_same([*found, elsewhere], 3 * [expected], near_ties=0)
    whole = (len(prompt) - 1) // BLOCK * BLOCK
    assert [one.cached_tokens for one in (*found, elsewhere)] == [0, whole, whole]
    # a sparse one goes on from the answer
    assert follower.cached_tokens == (len(prompt) - len(REST) - 1) // BLOCK * BLOCK
