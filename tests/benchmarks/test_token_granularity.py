"""The benchmark of slots for tokens: its load is the same for both sizes, and its figures have the right sign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.token_granularity import BLOCK, MEAN, fits, lengths, main, manager_costs, waste
from benchmarks.token_step import SMALL, measure

BLOCKS = f"blocks of {BLOCK}"


def test_nothing_is_wasted_by_tokens_and_half_a_block_by_blocks() -> None:
    assert sum(lengths(64, 0)) / 64 == pytest.approx(MEAN, rel=0.01)
    found = waste(64)
    assert found["token"] == 0
    assert found[BLOCKS] == pytest.approx(64 / (64 + MEAN), abs=0.03)


def test_more_conversations_fit() -> None:
    found = fits(0.03, seeds=1)
    assert found["token"] >= 1.1 * found[BLOCKS]


def test_every_kind_of_manager_has_a_cost() -> None:
    costs = manager_costs(8, 20)
    assert [(cost.size, cost.caching) for cost in costs] == [
        ("token", True),
        (BLOCKS, True),
        ("token", False),
        (BLOCKS, False),
    ]
    assert all(cost.allocation > 0 for cost in costs)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["--requests", "8", "--steps", "5", "--seeds", "1", "--share", "0.02", "--json", str(path)]) == 0
    assert "requests that fit" in capsys.readouterr().out
    assert set(json.loads(path.read_text())) == {"waste", "fits", "costs"}


def test_steps_of_both_engines_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    shape = {**SMALL, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 1}
    (row,) = measure(requests=3, context=40, rounds=(6,), repeats=1, shape=shape)
    assert row.block_ms > 0
    assert row.token_ms > 0
    assert row.token_entries > row.requests, "requests that decode together have slots between each other's"
