"""What the worker counts arrives in Prometheus's text, with the values that were counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observability.exposition import scrape
from tests.observability.step_metrics import total
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.observability.metric import METRICS
from vllm_gaudi_ucm.observability.step_metrics import DIMENSIONS, StepMetrics, forward_label

SIZES = st.integers(0, 10_000)
SHAPES = st.builds(Bucket, st.sampled_from(["c--", "--u", "-su", "csu"]), SIZES, SIZES, SIZES, SIZES, SIZES)


def test_a_graph_with_selected_blocks_has_a_label_of_its_own() -> None:
    shape = ForwardShape("-su", 8, 4, 16)
    assert forward_label(shape) == "-su q8 s4 u16"
    assert forward_label(shape.with_selected(64)) == "-su q8 s4 u16 x64"
    assert forward_label(ForwardShape.from_sizes(True, 8192, 0, 0, 0, 2)) == "c-- q8192 s0 u0 r2"


@given(st.lists(st.tuples(SHAPES, SHAPES), max_size=30))
@settings(max_examples=50)
def test_every_step_is_counted_once(steps: list[tuple[Bucket, Bucket]]) -> None:
    with TemporaryDirectory() as name:
        metrics = StepMetrics(Path(name))
        for true, padded in steps:
            metrics.step(true, padded)
        seen = scrape(Path(name))
    for phase, count in Counter(true.phase for true, _ in steps).items():
        assert seen[total("steps_total", phase=phase)] == count
    for place, dimension in enumerate(DIMENSIONS, start=1):
        assert seen[total("true_size_total", dimension=dimension)] == sum(true[place] for true, _ in steps)
        assert seen[total("padded_size_total", dimension=dimension)] == sum(padded[place] for _, padded in steps)
    hits = Counter(("forward", forward_label(padded.forward)) for _, padded in steps)
    hits += Counter(("logits", f"l{padded.logits}") for _, padded in steps)
    found = {key: count for key, count in seen.items() if "bucket_steps" in key}
    assert found == {total("bucket_steps_total", graph=g, bucket=b): count for (g, b), count in hits.items()}


def test_a_step_at_its_true_shape_hits_no_bucket(folder: Path) -> None:
    """Else true shapes, whose number has no bound, would become label values; a bucket that fits exactly is a hit."""
    metrics = StepMetrics(folder)
    true = Bucket("--u", 4, 0, 9, 4)
    metrics.step(true, true)
    assert not [key for key in scrape(folder) if "bucket" in key]
    metrics.step(true, Bucket("--u", 4, 0, 9, 4))
    assert scrape(folder)[total("bucket_steps_total", graph="forward", bucket="--u q4 s0 u9")] == 1
    assert scrape(folder)[total("bucket_steps_total", graph="logits", bucket="l4")] == 1
    assert scrape(folder)[total("steps_total", phase="--u")] == 2


def test_a_graph_for_remainders_is_another_one_than_a_bucket_of_its_sizes(folder: Path) -> None:
    metrics = StepMetrics(folder)
    true, padded = Bucket("cs-", 12, 3, 0, 1, 9), Bucket("cs-", 16, 4, 0, 1, 20)
    for tail in (True, False, True):
        metrics.step(true, padded, tail)
    shown = scrape(folder)
    for graph, steps in (("prompt_remainder", 2), ("forward", 1)):
        assert shown[total("bucket_steps_total", graph=graph, bucket="cs- q16 s4 u0 x20")] == steps
    assert shown[total("bucket_steps_total", graph="logits", bucket="l1")] == 3
    assert shown[total("padded_size_total", dimension="selected")] == 60


def test_times_recipes_and_bypasses(folder: Path) -> None:
    """covers: B10"""
    metrics = StepMetrics(folder)
    metrics.times(1.5, 20, 3)
    metrics.times(0.5, 10, 1)
    metrics.recipe()
    for _ in range(3):
        metrics.bypass('sampling on host: "logit_bias"')
    metrics.bypass("larger than every bucket")
    seen = scrape(folder)
    for stage, seconds in {"plan": 0.002, "forward": 0.03, "sample": 0.004}.items():
        assert seen[total("step_seconds_total", stage=stage)] == pytest.approx(seconds)
    assert seen[total("recipes_after_warm_up_total")] == 1
    bypasses = {key: value for key, value in seen.items() if "bypasses" in key}
    assert list(bypasses.values()) == [3, 1], bypasses
    assert total("bypasses_total", reason="larger than every bucket") in bypasses


def test_reads_and_stages_of_the_host(folder: Path) -> None:
    """Each by its reason, from the first one on."""
    metrics = StepMetrics(folder)
    work = HostWork(metrics.host_read, metrics.host_stage)
    assert not any("host" in key for key in scrape(folder))
    for reason in ("tokens", "tokens", "logprobs"):
        assert work.fetch(torch.ones(2), reason).tolist() == [1, 1]
    work.stage("drafts by n-grams")
    work.stage("drafts by n-grams")
    seen = scrape(folder)
    assert seen[total("host_reads_total", reason="tokens")] == 2
    assert seen[total("host_reads_total", reason="logprobs")] == 1
    assert seen[total("host_stages_total", stage="drafts by n-grams")] == 2
    assert work.take_counts() == (3, ("drafts by n-grams",))
    assert work.take_counts() == (0, ())


def test_known_series_start_at_zero_and_warm_up_when_it_begins(folder: Path) -> None:
    StepMetrics(folder)
    seen = scrape(folder)
    assert seen[total("recipes_after_warm_up_total")] == 0
    assert seen[total("steps_total", phase="csu")] == 0
    assert set(seen.values()) == {0}
    assert seen[total("warm_up_waits_total")] == seen[total("warm_up_wait_seconds_total")] == 0
    gauges = {metric.sample_name for metric in METRICS if metric.kind == "gauge"}
    assert not gauges & {key.partition("{")[0] for key in seen}


def test_warm_up_shows_the_latest_progress(folder: Path) -> None:
    metrics = StepMetrics(folder)
    metrics.warm_up(0, 60, 0.0, None)
    assert total("warm_up_skeleton_seconds") not in scrape(folder)
    metrics.warm_up(4, 60, 2.5, 2.5)
    metrics.warm_up(5, 57, 3.0, 2.5)  # fewer buckets: some did not fit in memory
    seen = scrape(folder)
    assert seen[total("warm_up_buckets", state="done")] == 5
    assert seen[total("warm_up_buckets", state="total")] == 57
    assert seen[total("warm_up_seconds")] == 3.0
    assert seen[total("warm_up_skeleton_seconds")] == 2.5


def test_waits_are_totals(folder: Path) -> None:
    metrics = StepMetrics(folder)
    metrics.waits(1, 0.25)
    metrics.waits(3, 0.75)
    seen = scrape(folder)
    assert seen[total("warm_up_waits_total")] == 3
    assert seen[total("warm_up_wait_seconds_total")] == 0.75


def test_engines_share_a_folder_and_nothing_else(folder: Path) -> None:
    shape = Bucket("--u", 4, 0, 9, 4)
    engines = [StepMetrics(folder, engine) for engine in range(3)]
    for engine, metrics in enumerate(engines):
        for _ in range(engine):
            metrics.step(shape, shape)
    seen = scrape(folder)
    values = [seen[f'gaudi_ucm_steps_total{{engine="{engine}",phase="--u"}}'] for engine in range(3)]
    assert values == [0, 1, 2]
    engines[1].close()
    assert {key.split('"')[1] for key in scrape(folder) if key.startswith("gaudi_ucm_steps")} == {"0", "2"}


def test_close_removes_the_folder_and_later_calls_are_harmless(folder: Path) -> None:
    metrics = StepMetrics(folder)
    metrics.close()
    assert not folder.exists()
    metrics.close()
    metrics.recipe()
    metrics.bypass("after close")
    assert scrape(folder) == {}


def test_files_of_an_earlier_engine_are_replaced(folder: Path) -> None:
    StepMetrics(folder).recipe()
    StepMetrics(folder)
    assert scrape(folder)[total("recipes_after_warm_up_total")] == 0


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = StepMetrics(None)
    metrics.step(Bucket("--u", 1, 0, 1, 1), Bucket("--u", 4, 0, 4, 4))
    metrics.warm_up(1, 2, 3.0, None)
    metrics.close()
    assert not list(tmp_path.iterdir())


def test_more_series_than_a_file_holds(folder: Path) -> None:
    """The 4096 graphs that a configuration can ask for have room; what comes after is dropped, the rest stays."""
    metrics = StepMetrics(folder)
    true = Bucket("csu", 8192, 4096, 131072, 1024)
    for extra in range(6000):
        metrics.step(true, Bucket("csu", 8192, 4096, 100_000 + extra, 1024))
    seen = scrape(folder)
    assert sum("bucket_steps" in key for key in seen) >= 4096
    assert seen[total("steps_total", phase="csu")] == 6000


def test_an_engine_without_a_folder_of_its_own_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others can write to is not used; the temp folder is everybody's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign = tmp_path / "gaudi-ucm-metrics-12345"
    foreign.mkdir()
    foreign.chmod(0o777)
    warnings: list[str] = []
    monkeypatch.setattr(
        "vllm_gaudi_ucm.observability.step_metrics.logger.warning", lambda text, *args: warnings.append(text % args)
    )
    StepMetrics.of_engine("12345", 0).recipe()
    assert not list(foreign.iterdir())
    (warning,) = warnings
    assert str(foreign) in warning
    assert "remove it" in warning
