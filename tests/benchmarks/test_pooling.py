"""The table of embeddings per second: rates, ratios, how alike both sides are, and a model that is missing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from benchmarks.engine import OURS, PEER
from benchmarks.pooling import COUNTS, LENGTHS, Row, main, make_prompts, make_sides, measure, report


class FakeSide:
    """Answers each order with embeddings that point one way, in a fixed time for each prompt."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._seconds = seconds
        self.orders: list[list[list[list[int]]]] = []

    def start(self) -> tuple[float, dict[str, Any]]:
        return 1.0, {"ready": True, "vllm": "0"}

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        batches = order["batches"]
        self.orders.append(batches)
        # the first call of a sample is slow, and does not count
        seconds = [9.0, *(self._seconds * len(prompts) for prompts in batches[1:])]
        return {"seconds": seconds, "outputs": [[0.6, 0.8] for _ in batches[-1]]}


def test_rates_and_ratios() -> None:
    ours, peer = [[1.0, 9.0, 1.0], [2.0, 2.0, 2.5]], [[4.0, 4.0, 1.5], [4.0, 3.0, 4.0]]
    row = Row(16, 4, {OURS: ours, PEER: peer}, {OURS: [[1.0, 0.0]], PEER: [[0.6, 0.8]]})
    assert (row.rate(OURS), row.rate(PEER)) == (4 / 1.5, 1.0)
    assert row.ratio() == 3.0, "the median of 4 and 2"
    assert row.spread() == (2.5, 3.5)
    assert row.ratio_of_fastest() == 1.5
    assert row.least_cosine() == pytest.approx(0.6)
    alone = Row(16, 4, {OURS: [[1.0]]}, {OURS: [[1.0]]})
    assert alone.rate(PEER) is alone.ratio() is alone.spread() is alone.ratio_of_fastest() is None
    assert alone.least_cosine() is None


@pytest.mark.parametrize(("length", "count", "calls"), [(16, 1, 48), (128, 1, 32), (512, 1, 8), (512, 64, 3)])
def test_calls_of_a_sample(length: int, count: int, calls: int) -> None:
    assert Row(length, count).calls == calls


def test_both_sides_get_the_same_prompts_and_the_first_repetition_does_not_count(tmp_path: Path) -> None:
    sides: list[Any] = [FakeSide(OURS, 0.5), FakeSide(PEER, 1.0)]
    with Progress(disable=True) as progress:
        rows, facts = measure(sides, 2, progress)
    assert sides[0].orders == sides[1].orders
    assert [(row.length, row.count) for row in rows] == [(length, count) for length in LENGTHS for count in COUNTS]
    assert all([len(calls) for calls in row.samples[OURS]] == [row.calls] * 2 for row in rows)
    file = tmp_path / "rows.json"
    report(rows, facts, argparse.Namespace(model=Path("m"), dtype="float32", repeats=2, json=file))
    written = json.loads(file.read_text())
    assert {row["ratio"] for row in written["rows"]} == {2.0}
    assert written["rows"][0]["least_cosine"] == pytest.approx(1.0)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_are_of_their_length_and_never_the_same(length: int) -> None:
    prompts = [*make_prompts(length, 3, 0), *make_prompts(length, 3, 1)]
    assert {len(prompt) for prompt in prompts} == {length}
    assert len({tuple(prompt) for prompt in prompts}) == 6


def test_sides_have_the_same_settings(tmp_path: Path) -> None:
    ours, peer = make_sides(tmp_path, tmp_path / "bin" / "python", "bfloat16")
    assert (ours.name, peer.name) == (OURS, PEER)
    assert ours.engine_args == peer.engine_args
    assert ours.worker == peer.worker


def test_a_model_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "scripts.embedding_model" in capsys.readouterr().err
