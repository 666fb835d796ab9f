"""Helpers of `test_kv_groups.py` that other tests use, too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import VOCAB
from tests.engine.window_models import WINDOW

TOKENS = 64


CHUNK = 64


OPTIONS = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "max_model_len": 256}


def prompts() -> list[list[int]]:
    """Shorter and longer than the window, and than the tokens of a step."""
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 150, WINDOW + 3, 130, 16)]


def engine(model: Path, mode: str, **options: Any) -> Engine:
    found = Engine(model, {"graphs": {"mode": mode, "max_graphs": 8}}, **{**OPTIONS, **options})
    found.poison()
    return found


def held_at_the_end(serving: Engine, prompt: list[int]) -> list[int]:
    """Blocks that a request has in each group in its last step, the fewest first."""
    manager = serving.core.scheduler.kv_cache_manager
    request_id = serving.new_id()
    held = []
    serving.add(request_id, prompt, greedy_params(TOKENS))
    while serving.core.scheduler.has_unfinished_requests():
        serving.step()
        tables = manager.coordinator.single_type_managers
        found = [
            sum(not block.is_null for block in table.req_to_blocks[key])
            for table in tables
            for key in table.req_to_blocks
            if key.startswith(request_id)
        ]
        held = found or held
    return sorted(held)
