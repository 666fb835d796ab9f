"""What a warm-up says: a bar on a terminal, lines at most every few seconds in a log, and the last table."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.records import (
    GraphKey,
    GraphRecord,
    GraphState,
    WarmUpProgress,
    WarmUpStage,
    WarmUpSummary,
    graph_name,
)
from vllm_gaudi_ucm.observability.warm_up_report import WarmUpReport, summary_line, warm_up_text

GIB = 2**30
DECODE = ForwardShape("-su", 16, 20, 1000)
logger = logging.getLogger("tests.warm_up_report")


def starts(done: int, total: int, key: GraphKey = DECODE, stage: WarmUpStage = "rest") -> WarmUpProgress:
    return WarmUpProgress(stage, done, total, key, None, 1.7 * done, 1.7 * (total - done) if done else None, 12 * GIB)


def ends(done: int, total: int, record: GraphRecord) -> WarmUpProgress:
    return WarmUpProgress("rest", done, total, None, record, 1.7 * done, 1.7 * (total - done), 12 * GIB)


class Log:
    """A report without a terminal, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.report = WarmUpReport(logger, Console(file=io.StringIO()), 5.0, lambda: self.now)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, logger.name)
    return Log()


def test_lines_come_every_few_seconds_and_at_the_end(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    warm = GraphRecord(DECODE, GraphState.WARM, 1.7, GIB)
    with log.report.bar():
        for done in range(10):
            log.report(starts(done, 10))
            log.now += 1.7
            log.report(ends(done + 1, 10, warm))
    assert caplog.messages == [
        "Warm-up, other buckets: 3/10 graphs, 5.1 s, about 12 s left, 12.0 GiB free",
        "Warm-up, other buckets: 6/10 graphs, 10.2 s, about 7 s left, 12.0 GiB free",
        "Warm-up, other buckets: 9/10 graphs, 15.3 s, about 2 s left, 12.0 GiB free",
        "Warm-up, other buckets: 10/10 graphs, 17.0 s, about 0 s left, 12.0 GiB free",
    ]


def test_a_line_names_the_graph_that_starts(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.now += 6.0
    log.report(starts(0, 6, 64, "skeleton"))
    assert caplog.messages == ["Warm-up, first buckets: 0/6 graphs, 0.0 s, 12.0 GiB free, now 64 logits rows"]


def test_what_is_lost_is_said_at_once(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """Once per bucket, whatever the clock says; covers: B10."""
    log.report(ends(1, 9, GraphRecord(DECODE, GraphState.DROPPED, reason="about 1.000 GiB do not fit")))
    log.report(ends(2, 9, GraphRecord(8, GraphState.FAILED, 2.0, reason="RuntimeError: phase c-- ran")))
    assert caplog.record_tuples == [
        (logger.name, logging.INFO, "Warm-up leaves out bucket -su 16 20 1000: about 1.000 GiB do not fit"),
        (
            logger.name,
            logging.WARNING,
            "Warm-up of 8 logits rows failed after 2.0 s; its steps run in a larger one: RuntimeError: phase c-- ran",
        ),
    ]


def test_a_terminal_gets_a_bar_and_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)
    screen = io.StringIO()
    report = WarmUpReport(logger, Console(file=screen, force_terminal=True, width=150, color_system=None), 0.0)
    with report.bar():
        report(starts(1, 6, stage="skeleton"))
        report(starts(3, 9))
    shown = screen.getvalue()
    assert caplog.messages == []
    for part in ("first buckets", "1/6", "other buckets", "3/9", "about 10 s left, 12.0 GiB free, now bucket -su 16"):
        assert part in shown
    report(starts(4, 9))
    assert len(caplog.messages) == 1
    assert screen.getvalue() == shown


def test_the_table_shows_every_graph_and_why_it_is_missing() -> None:
    summary = WarmUpSummary(
        (
            GraphRecord(DECODE, GraphState.WARM, 1.25, 3 * 2**20),
            GraphRecord(ForwardShape("c--", 512, 0, 0), GraphState.DROPPED, reason="does [not] fit"),
            GraphRecord(ForwardShape("csu", 2048, 3000, 3000), GraphState.WARM, 3.5, 2 * GIB),
            GraphRecord(8, GraphState.FAILED, 0.5, reason="RuntimeError: no"),
            GraphRecord(64, GraphState.WARM, 0.25, 0),
            GraphRecord(32, GraphState.COLD),
        ),
        skeleton_graphs=2,
        skeleton_seconds=3.75,
    )
    lines = [line.split() for line in warm_up_text(summary).splitlines()]
    assert lines[0][:6] == ["graph", "query", "shared", "unique", "logits", "state"]
    assert ["-su", "16", "20", "1,000", "warm", "1.25", "3"] in lines
    assert ["c--", "512", "0", "0", "dropped", "does", "[not]", "fit"] in lines
    assert ["logits", "8", "failed", "0.50", "RuntimeError:", "no"] in lines
    assert ["logits", "64", "warm", "0.25", "0"] in lines
    assert summary_line(summary) == (
        "3 of 6 graphs are warm after 5.5 s, the first 2 after 3.8 s; they take 2.00 GiB, 1 cold, 1 dropped, 1 failed"
    )
    assert warm_up_text(summary).splitlines()[-1] == summary_line(summary)


def test_the_table_has_a_column_of_selected_blocks_where_a_graph_has_any() -> None:
    records = (
        GraphRecord(DECODE, GraphState.WARM, 1.25, 3 * 2**20),
        GraphRecord(DECODE.with_selected(4000), GraphState.DROPPED, reason="no room"),
        GraphRecord(8, GraphState.COLD),
    )
    lines = [line.split() for line in warm_up_text(WarmUpSummary(records, 1, 1.0)).splitlines()]
    assert lines[0][:6] == ["graph", "query", "shared", "unique", "selected", "logits"]
    assert ["-su", "16", "20", "1,000", "0", "warm", "1.25", "3"] in lines
    assert ["-su", "16", "20", "1,000", "4,000", "dropped", "no", "room"] in lines
    assert ["logits", "8", "cold"] in lines


def test_graphs_for_remainders_are_lines_of_the_table() -> None:
    tail = RemainderShape(ForwardShape("cs-", 128, 4, 0, 51))
    records = (GraphRecord(DECODE, GraphState.COLD), GraphRecord(tail, GraphState.WARM, 1.25, 3 * 2**20))
    lines = [line.split() for line in warm_up_text(WarmUpSummary(records, 1, 1.0)).splitlines()]
    assert lines[0][:6] == ["graph", "query", "shared", "unique", "selected", "logits"]
    assert ["cs-", "prompt", "remainder", "128", "4", "0", "51", "warm", "1.25", "3"] in lines
    assert graph_name(tail) == "prompt remainder cs- 128 4 0 51"


def test_the_table_has_a_column_of_prompt_tiles_if_a_graph_bounds_them() -> None:
    prompts = ForwardShape("c--", 8192, 0, 0)
    records = [GraphRecord(shape, GraphState.COLD) for shape in (prompts.with_prompt_tiles(4), prompts)]
    lines = [line.split() for line in warm_up_text(WarmUpSummary((*records,), 1, 1.0)).splitlines()]
    assert lines[0][:6] == ["graph", "query", "shared", "unique", "tiles", "logits"]
    assert [line[:5] for line in lines[2:4]] == [["c--", "8,192", "0", "0", "4"], ["c--", "8,192", "0", "0", "cold"]]
    assert graph_name(prompts.with_prompt_tiles(4)) == "bucket c-- 8192 0 0 0 4"


def test_a_graph_with_selected_blocks_is_named_with_them() -> None:
    assert graph_name(DECODE) == "bucket -su 16 20 1000"
    assert graph_name(DECODE.with_selected(40)) == "bucket -su 16 20 1000 40"
