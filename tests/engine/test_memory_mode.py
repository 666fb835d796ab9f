"""Memory mode in the engine: blocks leave and come back while requests decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.test_sparse import COMMON, OPTIONS, STATIC, tokens

WINDOWS = {"min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
PROMPTS = [tokens(count) for count in (40, 130, 200, 260)] + [COMMON + tokens(60), COMMON + tokens(61)]


def ucm(ratio: float = 0.2, resident: float = 0.4, method: str = "GSA", static: bool = False, **mode: Any) -> Any:
    config: dict[str, Any] = {
        "ucm_sparse_method": method,
        "ucm_sparse_config": {method: {**WINDOWS, "sparse_ratio": ratio}},
        "memory_mode": {"enabled": True, "resident_ratio": resident, "refresh_steps": 4, **mode},
    }
    return {**config, "graphs": STATIC} if static else config


def check(engine: Engine) -> Any:
    """Conservation laws on both sides; returns the scheduler's side."""
    residency = engine._core.scheduler.residency
    residency.check_integrity()
    table = engine.runner.requests
    for life in residency._lives.values():
        blocks = residency._blocks.table(life.request_id)
        row = table.requests.get(life.request_id)
        # patches that are not sent yet are the only difference
        pending = {patch.number for patch in residency._orders.patches if patch.life == life.number}
        if row is not None and blocks:
            seen = table.blocks(life.request_id, len(blocks)).tolist()
            wanted = [block.block_id for block in blocks]
            assert all(a == b or n in pending for n, (a, b) in enumerate(zip(seen, wanted, strict=True)))
    return residency


def run(engine: Engine, prompts: Any, max_tokens: int) -> list[Any]:
    ids = [engine.new_id() for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add(request_id, prompt, greedy_params(max_tokens))
    finished: dict[str, Any] = {}
    while len(finished) < len(ids):
        finished.update((output.request_id, output) for output in engine.step() if output.finished)
        check(engine)
    return [finished[request_id] for request_id in ids]


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_blocks_leave_and_come_back(tiny_llama: Path, static: bool) -> None:
    with Engine(tiny_llama, ucm(static=static), **OPTIONS) as engine:
        run(engine, PROMPTS, 40)
        totals = check(engine).totals
        print(totals)
        assert totals.released and totals.loaded + totals.found
        engine.check_idle()
