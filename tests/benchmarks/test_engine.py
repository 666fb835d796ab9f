"""The whole-engine benchmark with fake workers: interleaving, ratios, one side at a time, failures that explain."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks import engine
from benchmarks.engine import OURS, PEER, main, make_sides, measure, report, table
from benchmarks.engine_result import Row
from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.engine_workloads import USUAL, Workload

FAKE = Path(__file__).with_name("fake_worker.py")
SMALL = (Workload("small", 2, 4, 3, goal=1.5), Workload("large", 3, 8, 2, goal=2.0))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def sides(journal: Path) -> Iterator[list[EngineSide]]:
    result = [fake(OURS, journal, seconds=0.5), fake(PEER, journal, seconds=1.0)]
    yield result
    for side in result:
        side.stop()


def fake(name: str, journal: Path, seconds: float = 1.0, **misbehaviour: bool) -> EngineSide:
    settings = {"name": name, "journal": str(journal), "seconds": seconds, **misbehaviour}
    return EngineSide(name, Path(sys.executable), settings, worker=FAKE, timeout_s=20.0)


def silent_progress() -> Progress:
    return Progress(console=Console(quiet=True), disable=True)


def becomes_stopped(pid: int) -> bool:
    """A signal takes effect when its process is next scheduled, so ask for a second."""
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_sides_alternate_within_every_repetition(sides: list[EngineSide], journal: Path) -> None:
    measure(sides, SMALL, repeats=3, startups=1, progress=silent_progress())
    lines = [line.split() for line in journal.read_text().splitlines()]
    assert [name for name, *_ in lines] == [OURS, PEER] * (2 * (3 + 1))
    assert [int(count) for _, count, _ in lines] == [2] * 8 + [3] * 8
    prompts = [text for *_, text in lines]
    assert prompts[::2] == prompts[1::2], "both sides must get the same prompts"
    assert len(set(prompts)) == 8, "no repetition may repeat a prompt"


def test_rows_hold_every_sample_but_the_warm_up(sides: list[EngineSide]) -> None:
    rows, facts = measure(sides, SMALL, repeats=3, startups=2, progress=silent_progress())
    assert [row.name for row in rows] == ["start-up", "small", "large"]
    assert {side: len(samples) for side, samples in rows[0].seconds.items()} == {OURS: 2, PEER: 2}
    assert rows[1].seconds == {OURS: [0.5] * 3, PEER: [1.0] * 3}
    assert rows[1].figure(OURS) == pytest.approx(2 * 7 / 0.5)
    assert rows[1].ratio(OURS, PEER) == pytest.approx(2.0)
    assert rows[1].agreement(OURS, PEER) == 1.0
    assert set(facts) == {OURS, PEER}


def test_the_peer_is_optional(sides: list[EngineSide]) -> None:
    rows, facts = measure(sides[:1], SMALL, repeats=1, startups=1, progress=silent_progress())
    assert all(row.ratio(OURS, PEER) is None and row.figure(PEER) is None for row in rows)
    assert list(facts) == [OURS]
    cells = [list(column.cells) for column in table(rows).columns]
    assert cells[2] == cells[3] == cells[4] == ["-", "-", "-"]


def test_an_idle_worker_is_stopped_and_an_ended_one_is_gone(journal: Path) -> None:
    side = fake(OURS, journal)
    side.start()
    answer = side.ask({"prompts": [[1]], "output_tokens": 1})
    assert becomes_stopped(answer["pid"])
    answer = side.ask({"prompts": [[2]], "output_tokens": 1})
    side.stop()
    assert not Path(f"/proc/{answer['pid']}").exists()


@pytest.mark.parametrize(
    ("misbehaviour", "says"),
    [("dies_at_start", "out of memory, said the fake"), ("dies_at_work", "a crash, said the fake")],
)
def test_a_dead_worker_explains_itself(journal: Path, misbehaviour: str, says: str) -> None:
    side = fake(PEER, journal, **{misbehaviour: True})
    try:
        with pytest.raises(SideFailed, match=f"(?s)worker of {PEER} .* ended; .*{says}"):
            measure([side], SMALL, repeats=1, startups=1, progress=silent_progress())
    finally:
        side.stop()


def test_a_silent_worker_is_given_up(journal: Path) -> None:
    side = fake(PEER, journal, silent=True)
    try:
        side.start()
        side.timeout_s = 0.2
        with pytest.raises(SideFailed, match="said nothing for 0 s"):
            side.ask({"prompts": [[1]], "output_tokens": 1})
    finally:
        side.stop()


def test_figures_are_medians() -> None:
    row = Row("w", tokens=100, goal=2.0)
    for ours, peer in zip((1.0, 9.0, 2.0), (4.0, 3.0, 50.0), strict=True):
        row.add(OURS, ours)
        row.add(PEER, peer)
    assert row.figure(OURS) == 50.0
    assert row.figure(PEER) == 25.0
    assert row.ratio(OURS, PEER) == 2.0


def test_start_up_compares_seconds() -> None:
    row = Row("start-up", tokens=None, goal=5.0)
    row.add(OURS, 8.0)
    row.add(PEER, 90.0)
    assert row.figure(OURS) == 8.0
    assert row.ratio(OURS, PEER) == 11.25


def test_agreement_counts_up_to_the_first_difference() -> None:
    row = Row("w", tokens=8, goal=1.0)
    row.add(OURS, 1.0, [[1, 2, 3, 4], [5, 6, 7, 8]])
    row.add(PEER, 1.0, [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert row.agreement(OURS, PEER) == 6 / 8
    assert Row("w", tokens=8, goal=1.0).agreement(OURS, PEER) is None


def test_workloads_are_those_of_the_table_and_reproducible() -> None:
    assert [(w.requests, w.prompt_tokens, w.output_tokens) for w in USUAL] == [
        (4, 1024, 1),
        (1, 32, 64),
        (16, 64, 64),
        (16, 512, 32),
    ]
    for workload in USUAL:
        prompts = workload.prompts(0)
        assert [len(prompt) for prompt in prompts] == [workload.prompt_tokens] * workload.requests
        assert prompts == workload.prompts(0) != workload.prompts(1)
        assert len({tuple(prompt) for prompt in prompts}) == workload.requests


def test_both_sides_get_the_same_engine(tmp_path: Path) -> None:
    ours, peer = make_sides(tmp_path, Path("peer/python"))
    assert {**peer.engine_args, "enforce_eager": None} == {**ours.engine_args, "enforce_eager": None}
    assert peer.engine_args["enforce_eager"] is False
    assert ours.engine_args["enable_prefix_caching"] is True
    assert ours.environment["THP_MEM_ALLOC_ENABLE"] == peer.environment["THP_MEM_ALLOC_ENABLE"] == "1"
    bound = peer.environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert int(ours.environment["OMP_NUM_THREADS"]) == len(bound) == len(os.sched_getaffinity(0))
    assert int(peer.environment["VLLM_CPU_KVCACHE_SPACE"]) * 2**30 == ours.engine_args["kv_cache_memory_bytes"]


def test_report_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("small", tokens=14, goal=1.5)
    row.add(OURS, 0.5, [[1, 2]])
    row.add(PEER, 1.0, [[1, 2]])
    args = argparse.Namespace(model=tmp_path, dtype="bfloat16", repeats=1, json=tmp_path / "bench.json")
    report([row], {OURS: {"ready": True, "vllm": "0.32.0"}, PEER: {"ready": True, "vllm": "0.32.0"}}, args)
    out = capsys.readouterr().out
    assert "2.00x" in out
    assert "make bench-peers" not in out
    value = json.loads(args.json.read_text())
    assert value["rows"][0]["ratio"] == 2.0
    assert value["rows"][0]["seconds"] == {OURS: [0.5], PEER: [1.0]}


def test_a_missing_model_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "`make model`" in capsys.readouterr().err


def test_a_terminated_run_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    side = fake(OURS, tmp_path / "journal")
    pids: list[int] = []

    def terminated(*_: object) -> None:
        side.start()
        pids.append(side.ask({"prompts": [[1]], "output_tokens": 1})["pid"])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(engine, "make_sides", lambda *_: [side])
    monkeypatch.setattr(engine, "measure", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            main(["--model", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_the_default_peer_is_used_only_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEFAULT_PEER", tmp_path / "python")
    assert engine._parse([]).peer_python is None
    (tmp_path / "python").touch()
    assert engine._parse([]).peer_python == tmp_path / "python"
