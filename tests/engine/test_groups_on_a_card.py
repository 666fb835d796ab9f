"""Several KV-cache groups beside what moves blocks, on the simulated card: tokens are those of Transformers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, transfer
from tests.engine.hpu_process import run_on_card
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer
from tests.engine.swap import Poisoned
from tests.engine.tiny_models import VOCAB, make_model
from tests.engine.window_models import window_config

pytestmark = pytest.mark.slow  # starts engines

TOKENS = 16
RNG = random.Random(9)
# longer than a window, and no multiple of a block
COMMON = [RNG.randrange(3, VOCAB) for _ in range(43)]
PROMPTS = [COMMON + [RNG.randrange(3, VOCAB) for _ in range(length)] for length in (5, 30, 12, 21, 3, 17, 9)]
ARRIVALS = [3 * index for index in range(len(PROMPTS))]
# blocks that hold one request, and not all
TIGHT = 20
# requests of an engine with a store, whose answers need not be long
STORED, FEW = 4, 6
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 112}


def serve(model: str, store: str) -> list[Any]:
    """Answers and counts of an engine that swaps, then of two with a store."""
    found: list[Any] = []
    copies = {"kv_cache": {"partial_hits": True}, "graphs": {"mode": "off"}}
    swaps = {**copies, "preemption": {"mode": "swap", "host_memory": 4 << 20}}
    with Poisoned(Path(model), swaps, **OPTIONS, num_gpu_blocks_override=TIGHT) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        answers = engine.staggered(PROMPTS, ARRIVALS, TOKENS)
        totals = engine.totals
        found.append([list(map(dataclasses.asdict, answers)), totals.copies, totals.swapped_in])
        engine.check_all_free()
    for _ in range(2):
        with Poisoned(Path(model), copies, **OPTIONS, kv_transfer_config=transfer(file_store(Path(store)))) as engine:
            answers = engine.staggered(PROMPTS[:STORED], ARRIVALS[:STORED], FEW)
            loaded = engine.runner.parts.transfer._ours.worker_side.loads.counts.loaded_blocks
            found.append([list(map(dataclasses.asdict, answers)), engine.totals.copies, loaded])
            for _ in range(3):
                engine.step()
            engine.check_idle()
    return found


def test_swaps_stores_and_partial_hits(tmp_path: Path) -> None:
    config = window_config("gemma3_text")
    model = make_model(tmp_path / "model", config)
    found = run_on_card(serve, tmp_path, model=str(model), store=str(tmp_path / "store")).result
    reference = ReferenceModel(model, "eager")
    for answers, _, _ in found:
        reference.assert_greedy(PROMPTS[: len(answers)], [Answer(**answer) for answer in answers])
    # the third engine loads what it would have copied
    (_, copied, swapped), (_, copied_too, first), (_, _, second) = found
    assert copied
    assert copied_too
    assert swapped
    assert (first, bool(second)) == (0, True)
