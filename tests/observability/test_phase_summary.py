"""Totals by phase: exact sums, a median from bounded memory, shares that add up, and a readable table."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from tests.observability.records import mixed_steps, step
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, PhaseTotals, summary_text
from vllm_gaudi_ucm_tools.phases.phase_bars import BAR_WIDTH, phase_bars
from vllm_gaudi_ucm_tools.phases.summary_json import summary_json


def test_totals_are_the_sums_of_the_steps() -> None:
    records = mixed_steps(300)
    summary = PhaseSummary(records)
    total = summary.total()
    assert total.steps == summary.steps == 300
    assert total.tokens == sum(r.tokens for r in records)
    assert total.pairs == sum(r.causal_pairs + r.shared_pairs + r.unique_pairs for r in records)
    assert total.ms == pytest.approx(sum(r.plan_ms + r.forward_ms + r.sample_ms for r in records))
    assert {phase: t.steps for phase, t in summary.ranked()} == {
        phase: sum(r.bucket.phase == phase for r in records) for phase in {r.bucket.phase for r in records}
    }


def test_phases_are_ranked_by_steps() -> None:
    counts = [totals.steps for _, totals in PhaseSummary(mixed_steps(300)).ranked()]
    assert counts == sorted(counts, reverse=True)


def test_the_median_is_within_its_time_class() -> None:
    rng = random.Random(1)
    times = [rng.lognormvariate(2, 1) for _ in range(5001)]
    summary = PhaseSummary(step(i, "--u", ms) for i, ms in enumerate(times))
    assert summary.by_phase["--u"].p50_ms == pytest.approx(statistics.median(times), rel=0.03)


def test_memory_does_not_grow_with_steps() -> None:
    totals = PhaseTotals()
    for index in range(5000):
        totals.add(step(index, ms=0.5 + index * 0.01))
    assert len(totals.time_classes) < 120


def test_attention_shares_add_up_and_survive_no_work() -> None:
    shares = PhaseSummary([step(0, pairs=(1, 2, 5))]).total().attention_shares()
    assert shares == {"causal": 0.125, "shared": 0.25, "unique": 0.625}
    assert set(PhaseSummary([step(0, "---", pairs=(0, 0, 0))]).total().attention_shares().values()) == {0.0}


def test_the_selected_part_is_named_where_it_worked() -> None:
    records = [step(0, pairs=(1, 2, 5)), replace(step(1, "--u", pairs=(0, 0, 4)), selected_pairs=8, sparse=2)]
    summary = PhaseSummary(records)
    assert summary.total().attention_shares() == {"causal": 0.05, "shared": 0.1, "unique": 0.45, "selected": 0.4}
    assert (summary.total().selected_pairs, summary.total().sparse) == (8, 2)
    assert [phase["selected_pairs"] for phase in summary_json(summary)["phases"]] == [8, 0]
    lines = summary_text(summary).splitlines()
    assert lines[0].split()[-1] == "selected"
    assert next(line for line in lines if line.strip().startswith("--u")).split()[-1] == "66.7%"
    assert next(line for line in lines if line.strip().startswith("csu")).split()[-1] == "-"
    assert "unique 45.0%, selected 40.0%" in summary_text(summary)
    assert max(len(line) for line in lines) <= 110
    assert "selected" not in summary_text(PhaseSummary(records[:1]))


def test_json_is_plain_and_its_shares_add_up() -> None:
    value = summary_json(PhaseSummary(mixed_steps(300)))
    assert sum(phase["step_share"] for phase in value["phases"]) == pytest.approx(1, abs=1e-5)
    assert sum(phase["time_share"] for phase in value["phases"]) == pytest.approx(1, abs=1e-5)
    assert value["planning_share"] == pytest.approx(0.1, abs=1e-5)
    assert value["steps"] == 300


def test_an_empty_summary_is_all_zero() -> None:
    summary = PhaseSummary()
    assert (summary.steps, summary.planning_share(), summary.total().p50_ms) == (0, 0.0, 0.0)
    assert summary_json(summary)["phases"] == []
    assert "attention work" in summary_text(summary)


def test_a_step_of_no_time_is_counted() -> None:
    summary = PhaseSummary([step(0, ms=0.0)])
    assert summary.total().p50_ms < 0.01
    assert summary_json(summary)["phases"][0]["time_share"] == 0.0


def test_the_text_has_one_line_per_phase_and_the_totals() -> None:
    lines = summary_text(PhaseSummary([*(step(i, "--u", 4.0) for i in range(3)), step(3, "c--", 12.0)])).splitlines()
    decode = next(line for line in lines if line.strip().startswith("--u")).split()
    assert decode[1:5] == ["3", "75.0%", "120", "4.00"]
    assert float(decode[5]) == pytest.approx(4.0, rel=0.03)
    assert any(line.strip().startswith("all") and " 4 " in line for line in lines)
    assert max(len(line) for line in lines) <= 100


def test_the_longest_bar_fills_the_width_and_the_shortest_is_visible() -> None:
    records = [*(step(i, "--u") for i in range(1000)), step(1000, "c--")]
    bars = [str(cell) for cell in phase_bars(PhaseSummary(records)).columns[1].cells]
    assert bars[0] == "█" * BAR_WIDTH
    assert len(bars[1]) == 1
