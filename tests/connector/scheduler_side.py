"""Helpers of `test_scheduler_side.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fault_store import FaultStore
from tests.connector.setup import make_setup
from vllm_gaudi_ucm.connector.scheduler_side import SchedulerSide

BLOCK = 16


def make_request(name: str, count: int, **more: Any) -> Any:
    """The fields of vLLM's request that are read."""
    fields: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(range(count)),
        "num_tokens": count,
        "num_computed_tokens": 0,
        "skip_reading_prefix_cache": False,
        "sampling_params": None,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "_block_hasher": lambda request: [],
        "block_hashes": [],
        "update_block_hashes": lambda: None,
    }
    return SimpleNamespace(**{**fields, **more})


def scheduled(**num_scheduled: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=num_scheduled)


class Side:
    """A scheduler side over a store in a dictionary."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, offload: Any = None, **changes: Any) -> None:
        self.store = FaultStore()
        monkeypatch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: self.store)
        self.setup = setup = make_setup(folder, **changes)
        # what prefetches for waiting requests are planned by
        setup.vllm_config.scheduler_config = SimpleNamespace(max_num_seqs=4)  # type: ignore[misc]
        self.side = SchedulerSide(setup, lambda request_id: [list(range(100, 200))], offload=offload)

    def save(self, count: int) -> list[bytes]:
        """Keys of the blocks of a request with so many tokens, now stored."""
        request = make_request("first", count)
        self.side.begin(request)
        saves = self.side.metadata(scheduled(first=count)).saves
        self.store.blocks.update({save.key: b"" for save in saves})
        self.side.end("first")
        return [save.key for save in saves]


def matched(side: Side, request: Any, computed: int = 0) -> int | None:
    """Asks step by step until there is an answer."""
    for _ in range(1000):
        found = side.side.matched_tokens(request, computed)
        if found is not None:
            return found
        side.side.metadata(scheduled())
    return None
