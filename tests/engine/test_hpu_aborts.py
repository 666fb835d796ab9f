"""Aborts while the card still computes: what it writes late reaches no block that another request was given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, transfer
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow  # starts engines on the simulated card

BLOCK = 16
STORED, OTHER, OUTPUTS, ROUNDS = 115, 30, 8, 3
# the stored prompt and its answer take all blocks but the null block
BLOCKS = (STORED + OUTPUTS) // BLOCK + 2
# a step of three prompts, none of whose chunks fills a block: nothing is read from the card, nor saved
CHUNK, PROMPTS = 4, 3
OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": PROMPTS * CHUNK,
    "long_prefill_token_threshold": CHUNK,
    "num_gpu_blocks_override": BLOCKS,
    "block_size": BLOCK,
}


def serve(model: str, store: str) -> dict[str, Any]:
    """Answers of a stored prompt, the first one computed, the others loaded after aborts; and of each load the blocks
    that an aborted request had been given before."""
    rng = random.Random(5)
    stored, *prompts = ([rng.randrange(3, VOCAB) for _ in range(size)] for size in (STORED, *[OTHER] * PROMPTS))
    graphs = {"graphs": {"warm_up": "full", "max_graphs": 3}}
    # a busy machine must not make a miss of a slow answer
    config = transfer({**file_store(Path(store)), "deadline": 30.0}, lookup_deadline=30.0, load_deadline=30.0)
    with Engine(Path(model), graphs, kv_transfer_config=config, **OPTIONS) as engine:
        manager = engine.core.scheduler.kv_cache_manager
        answers, taken = [engine.greedy([stored], OUTPUTS)[0]], []
        side = engine.runner.transfer.connector.worker_side  # type: ignore[union-attr]
        loads = side.loads
        for _ in range(ROUNDS):
            assert side.saver.flush(60.0)
            assert engine.core.scheduler.reset_prefix_cache()
            names = [engine.new_id() for _ in prompts]
            for name, prompt in zip(names, prompts, strict=True):
                engine.add(name, prompt, greedy_params(OUTPUTS))
            # on a busy machine the store's answer for one of them may come a step later; a block takes four chunks
            for _ in range(BLOCK // CHUNK - 1):
                if len(engine.core.scheduler.running) < PROMPTS:
                    engine.step()
            assert len(engine.core.scheduler.running) == PROMPTS, "a step of chunks"
            given = {block for request in engine.core.scheduler.requests for block in manager.get_block_ids(request)[0]}
            engine.llm.llm_engine.abort_request(names, internal=False)
            before = loads.counts.loaded_blocks
            answers.append(engine.greedy([stored], OUTPUTS)[0])
            assert loads.counts.loaded_blocks - before == (STORED - 1) // BLOCK
            taken.append(sorted(given))
        engine.step()
        engine.check_idle()
        return {"answers": [vars(answer) for answer in answers], "taken": taken}


def test_loads_come_after_chunks_of_requests_that_were_aborted(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: F6 A7. vLLM gives the blocks of an aborted request to the next one while its chunk is computed."""
    found = run_on_card(serve, tmp_path, model=str(tiny_llama), store=str(tmp_path)).result
    computed, *loaded = (Answer(**answer) for answer in found["answers"])
    assert all(len(taken) == PROMPTS for taken in found["taken"])
    assert [answer.cached_tokens for answer in loaded] == [(STORED - 1) // BLOCK * BLOCK] * ROUNDS
    assert_same(loaded, [computed] * ROUNDS, near_ties=0)
