"""Helpers of `test_partial_hits.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

from tests.engine.serving import Engine

WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


def gsa(ratio: float) -> dict[str, Any]:
    return {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**WINDOWS, "sparse_ratio": ratio}}}


def count_scheduled(engine: Engine) -> list[int]:
    """Tokens that steps have computed, in a list of one."""
    count = [0]
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        count[0] += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counting
    return count
