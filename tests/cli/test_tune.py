"""`gaudi-ucm tune`: the goals on every mix, the bucket file, its errors."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, dominates
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies.file import read_bucket_file
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader
from vllm_gaudi_ucm_tools.buckets.certificate import certify
from vllm_gaudi_ucm_tools.buckets.padding import measure_padding
from vllm_gaudi_ucm_tools.buckets.tune import TuneReport, read_steps
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Simulation
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.tune import DEFAULT_MARGIN, tune

COST = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
STEPS, LATER = 3_000, 1_500
MOST_GAP = 0.03


@cache
def traffic(mix: str) -> tuple[Simulation, Steps, Steps]:
    """A mix's first steps, and those after them."""
    simulation = Simulation(MIXES[mix], COST, seed=0)
    first, after = (Steps.from_buckets(record.bucket for record in simulation.steps(count)) for count in (STEPS, LATER))
    return simulation, first, after


@cache
def tuned(mix: str) -> TuneReport:
    _, steps, after = traffic(mix)
    limits = MIXES[mix].limits
    objective = Objective.of(steps, limits, COST, DEFAULT_MARGIN)
    certified = certify(objective, tune(steps, limits, COST, 64), 64, MOST_GAP)
    return TuneReport(certified, steps, 64, DEFAULT_MARGIN, after)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_padded_cost_is_within_15_percent_at_64_graphs(mix: str) -> None:
    """covers: B8."""
    report = tuned(mix)
    assert report.buckets.num_graphs <= 64
    assert report.padding.ratio <= 1.15
    assert report.padding.maximum_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_tuned_beats_every_other_strategy_at_as_many_graphs(mix: str) -> None:
    report = tuned(mix)
    for name, padding in report.others.items():
        assert padding.buckets.num_graphs <= 64
        assert report.padding.seconds < padding.seconds, name


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_the_gap_is_small_and_the_margin_pays_off_later(mix: str) -> None:
    """Without a margin, later steps that no bucket holds would run in the maximum."""
    report = tuned(mix)
    assert 1.0 <= report.bound_ratio <= report.fitted_ratio
    assert report.certified.gap <= MOST_GAP
    _, steps, after = traffic(mix)
    assert report.later_padding is not None
    assert report.later_padding.ratio <= 1.2
    exact = measure_padding(tune(steps, MIXES[mix].limits, COST, 64, margin=0.0), after)
    assert report.later_padding.ratio < exact.ratio


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_all_later_steps_find_a_bucket(mix: str) -> None:
    """covers: B1."""
    simulation, _, _ = traffic(mix)
    buckets = tuned(mix).buckets
    for record in Simulation(MIXES[mix], COST, seed=11).steps(LATER // 3):
        assert dominates(buckets.lookup(record.bucket), record.bucket)
    assert simulation.mix.limits == buckets.limits


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "chat.jsonl"
    assert cli.main(["trace", "--mix", "chat", "--steps", "800", "-o", str(path)]) == 0
    return path


def run(*argv: str | Path | int) -> int:
    return cli.main([str(arg) for arg in argv])


def test_the_file_holds_what_the_report_says(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "buckets.yaml"
    assert run("tune", log, "--max-graphs", 24, "--holdout", 0.25, "-o", file, "--json") == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (value["steps"], value["held_out"]["steps"]) == (600, 200)
    assert value["graphs"] == value["forward_graphs"] + value["logits_graphs"] <= 24
    assert 0 <= value["gap_at_most"] <= 0.05
    assert value["bound_ratio"] <= value["fitted_ratio"]
    assert set(value["other_strategies"]) == {"exponential", "linear", "padding_aware"}
    limits, forward, logits = read_bucket_file(file)
    assert limits == replace(MIXES["chat"].limits, bounds_prompt_tiles=True), "of the device that they are for, a Gaudi"
    assert [shape.to_list() for shape in forward] == value["forward"]
    assert logits == value["logits"]


@pytest.mark.slow
def test_the_table_compares(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", log, "--max-graphs", 16, "--device", "h200", "--gap", 1) == 0
    captured = capsys.readouterr()
    for text in ("tuned", "exponential", "linear", "padding_aware", "above the optimum"):
        assert text in captured.out


def test_a_log_that_does_not_say_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Limits that are missing are named; given as options they are taken."""
    from tests.observability.records import mixed_steps, write_log

    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(100))
    assert run("tune", path) == 2
    assert "--max-num-batched-tokens, --max-model-len, --num-blocks" in capsys.readouterr().err
    given = ("--max-num-batched-tokens", 256, "--max-model-len", 512, "--num-blocks", 100)
    assert run("tune", path, *given, "--max-graphs", 8, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100
    assert run("tune", path, *given[:2], "--max-model-len", 512, "--num-blocks", 3, "--max-graphs", 8) == 2
    assert "observed steps have unique_blocks 5, the limits allow 3" in capsys.readouterr().err


def test_steps_in_graphs_for_remainders_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tuning, and of the picture of what was tuned."""
    from tests.observability.records import mixed_steps, tail_step, write_log

    path, file = tmp_path / "phases.jsonl", tmp_path / "buckets.yaml"
    write_log(path, [*mixed_steps(50), tail_step(50), *mixed_steps(50), tail_step(101)])
    given = ("--max-num-batched-tokens", 256, "--max-model-len", 512, "--num-blocks", 100)
    assert run("tune", path, *given, "--max-graphs", 8, "--holdout", 0.5, "-o", file, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["steps"], value["held_out"]["steps"]) == (50, 50)
    assert run("plot", path, *given, "--buckets", file, "-o", tmp_path / "steps.html") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-graphs", "1"], "max_graphs is 1"),
        (["--margin", "1.5"], "--margin is 1.5"),
        (["--holdout", "-1"], "--holdout is -1.0"),
        (["--gap", "2"], "--gap is 2.0"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--model", "/none/config.json"], "/none/config.json"),
    ],
)
def test_bad_options_are_one_line(
    log: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tune", log, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""


def test_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "log.jsonl"
    other.write_text('{"schema": "gaudi-ucm.phase-log/99"}\n')
    assert run("tune", other) == 2
    assert "gaudi-ucm.phase-log/1" in capsys.readouterr().err


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_memory_follows_distinct_shapes_and_not_lines(tmp_path: Path, holdout: float) -> None:
    """covers: F11. 8,000 steps of 100 shapes: a list of them takes 10 MB, and a million 1.25 GB."""
    from tests.observability.records import step, write_log

    path = tmp_path / "phases.jsonl"
    shapes = [Bucket("--u", 1 + rows, 0, 1 + blocks, 1 + rows) for rows in range(10) for blocks in range(10)]
    write_log(path, [replace(step(0), bucket=shape, padded=shape) for shape in shapes])
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(header + "".join(lines) * 80)
    tracemalloc.start()
    try:
        with PhaseLogReader(path) as log:
            steps, later = read_steps([log], holdout)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert (steps.count, later.count) == ((6_400, 1_600) if holdout else (8_000, 0))
    assert len(steps.forward) == 100
