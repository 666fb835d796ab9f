"""The buckets that a configuration asks for, and what is said of files that do not fit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.tiny_models import make_config
from tests.observability.records import mixed_steps, step, tail_step, write_log
from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.decisions.bucket_choice import (
    choose_buckets,
    cost_model,
    logger,
    reads_own_blocks,
    server_limits,
    strategy_name,
)
from vllm_gaudi_ucm.decisions.step_memory import MOST_SHARED_ENTRIES
from vllm_gaudi_ucm.device.cpu import CpuDevice
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.few_shapes import lacks_sparse_decodes
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.graphs.strategies.file import BucketFileError, write_bucket_file
from vllm_gaudi_ucm.graphs.strategies.grid import coarsest_grid
from vllm_gaudi_ucm.observability.phase_log import PhaseLogError
from vllm_gaudi_ucm.observability.step_record import StepRecord

DEVICE = CpuDevice()


def engine_config(max_num_batched_tokens: int = 64, max_num_seqs: int = 8, max_model_len: int = 256) -> Any:
    scheduler = SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    model = SimpleNamespace(max_model_len=max_model_len, use_mla=False, hf_text_config=make_config("llama"))
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    return SimpleNamespace(scheduler_config=scheduler, model_config=model, parallel_config=parallel)


VLLM = engine_config()
LIMITS = server_limits(VLLM, 16, 100, contiguous=False, max_shared_blocks=None)


def graphs(**options: Any) -> GraphsConfig:
    return resolve_config({"ucm": {"graphs": {key: _plain(value) for key, value in options.items()}}}).graphs


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def chosen(limits: Limits = LIMITS, num_remainders: int = 0, **options: Any) -> tuple[BucketSet, Steps | None]:
    return choose_buckets(graphs(**options), VLLM, limits, DEVICE, num_remainders)


@pytest.fixture
def bucket_file(tmp_path: Path) -> Path:
    forward = [ForwardShape("--u", 8, 0, 40), ForwardShape("c--", 32, 0, 0)]
    path = tmp_path / "buckets.yaml"
    write_bucket_file(path, BucketSet(forward, [4], LIMITS, cost_model(VLLM, DEVICE, 16)), {})
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps())
    return path


def of_shape(bucket: Bucket) -> StepRecord:
    return replace(step(0), bucket=bucket, padded=bucket)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "padding_aware"),
        ({"strategy": "linear"}, "linear"),
        ({"trace": Path("t")}, "trace"),
        ({"buckets": Path("b")}, "file"),
        ({"buckets": Path("b"), "trace": Path("t")}, "file"),
        ({"strategy": "exponential", "buckets": Path("b"), "trace": Path("t")}, "exponential"),
        ({"strategy": "trace", "buckets": Path("b"), "trace": Path("t")}, "trace"),
    ],
)
def test_the_strategy_follows_from_the_files_that_are_given(options: dict[str, Any], name: str) -> None:
    assert strategy_name(graphs(**options)) == name


@pytest.mark.parametrize(("strategy", "key"), [("file", "buckets"), ("trace", "trace")])
def test_a_strategy_without_its_file(strategy: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"ucm\.graphs\.strategy: '{strategy}' needs the file ucm\.graphs\.{key}"):
        chosen(strategy=strategy)


@pytest.mark.parametrize("strategy", ["auto", "exponential", "linear", "padding_aware"])
def test_without_files_buckets_come_from_the_limits(strategy: str) -> None:
    """covers: A17 B1"""
    for vllm in (VLLM, engine_config(max_num_seqs=1), engine_config(1, 1, 1)):
        limits = server_limits(vllm, 16, 100, contiguous=False, max_shared_blocks=None)
        buckets, usage = choose_buckets(graphs(strategy=strategy, max_graphs=12), vllm, limits, DEVICE)
        assert usage is None
        assert buckets.num_graphs <= 12
        assert buckets.forward[-1] == limits.maximum.forward
        assert buckets.logits[-1] == limits.max_num_seqs


@pytest.mark.parametrize(("sparse", "remainders"), [(False, 0), (True, 0), (True, 3)])
def test_too_few_graphs_for_any_grid_are_warned_of(
    sparse: bool, remainders: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With a sparse method most phases have two graphs, so that a count that served before leaves prompts without one.

    covers: B8
    """
    limits = replace(LIMITS, max_selected_blocks=24 if sparse else 0)
    needed = coarsest_grid(BucketRequest(limits, cost_model(VLLM, DEVICE, 16))).num_graphs + remainders
    caplog.set_level(logging.WARNING, logger.name)
    logger.addHandler(caplog.handler)
    try:
        assert len(chosen(limits, remainders, max_graphs=needed)[0].forward) == needed - remainders - 1
        assert not caplog.messages
        fewer = chosen(limits, remainders, max_graphs=needed - 1)[0]
        assert 1 < len(fewer.forward) < needed - remainders - 1
        assert len(chosen(limits, remainders, max_graphs=2)[0].forward) == 1
    finally:
        logger.removeHandler(caplog.handler)
    expected = f"ucm.graphs.max_graphs: found {needed - 1}, expected at least {needed} for strategy padding_aware"
    beside = (" with a sparse method" if sparse else "") + (
        f" and {remainders} graphs for prompt remainders" if remainders else ""
    )
    assert caplog.messages[0].startswith(f"{expected}{beside}: decodes have graphs")
    assert f"{beside}: only the largest" in caplog.messages[-1]


@pytest.mark.parametrize("max_graphs", [3, 4, 8, 10, 12, 16])
def test_a_sparse_decode_never_runs_in_the_graph_of_a_prompt(max_graphs: int) -> None:
    """Where it would, it is slower than dense: with 8 graphs it was 0.56 times as fast on an H200."""
    limits = replace(LIMITS, max_selected_blocks=24)
    buckets, _ = choose_buckets(graphs(max_graphs=max_graphs), VLLM, limits, DEVICE, live_blocks=4)
    assert buckets.num_graphs <= max_graphs
    for chosen_blocks in (0, 1, 24):
        for shared, unique in ((0, 4), (4, 28), (0, 68), (32, 67), (32, 0)):
            phase = ForwardShape.from_sizes(False, 8, shared, unique, chosen_blocks).step(8)
            assert "c" not in buckets.lookup(phase).phase, phase


def test_a_trace_or_a_file_without_sparse_decodes_gets_a_bucket_for_them(trace: Path, tmp_path: Path) -> None:
    """Within `max_graphs`; a file keeps all of its own."""
    limits, path = replace(LIMITS, max_selected_blocks=24), tmp_path / "sparse.yaml"
    forward = [ForwardShape("--u", 8, 0, 40), ForwardShape("c--", 32, 0, 0)]
    write_bucket_file(path, BucketSet(forward, [4], limits, cost_model(VLLM, DEVICE, 16)), {})
    step = ForwardShape.from_sizes(False, 8, 4, 28, 24).step(8)
    for given, most in (({"trace": trace, "max_graphs": 8}, 8), ({"buckets": path, "max_graphs": 8}, 6)):
        found = chosen(limits, **given)[0]
        assert found.num_graphs <= most
        assert "c" not in found.lookup(step).phase, given
        assert found.lookup(limits.maximum) == limits.maximum
    assert ForwardShape("--u", 8, 0, 40) in found.forward
    assert lacks_sparse_decodes(BucketSet([ForwardShape("--u", 8, 0, 40)], (), limits, found.cost))
    assert not lacks_sparse_decodes(BucketSet([ForwardShape("--u", 8, 0, 40)], (), LIMITS, found.cost))


def test_graphs_for_remainders_are_a_part_of_max_graphs(bucket_file: Path) -> None:
    """Beside the two largest buckets at least; a bucket file is as large as it is."""
    for count, left in ((24, 21), (4, 2), (2, 2)):
        assert (
            chosen(LIMITS, 3, max_graphs=count)[0].num_graphs == chosen(LIMITS, max_graphs=left)[0].num_graphs <= left
        )
    assert chosen(LIMITS, 3, max_graphs=5, buckets=bucket_file)[0].num_graphs == 5


def test_a_grid_of_a_sparse_method_needs_more_graphs() -> None:
    cost = cost_model(VLLM, DEVICE, 16)
    dense, sparse = (coarsest_grid(BucketRequest(x, cost)) for x in (LIMITS, replace(LIMITS, max_selected_blocks=24)))
    assert len(sparse.forward) > 1.5 * len(dense.forward)


def test_the_limits_are_the_servers_and_shared_blocks_those_of_two_requests() -> None:
    """covers: B3"""
    expected = Limits(64, 8, 256, 16, 100, contiguous=False, max_shared_blocks=32)
    assert expected == LIMITS
    assert server_limits(VLLM, 16, 100, True, 20).most_shared_blocks == 20
    with pytest.raises(LimitsError, match="max_shared_blocks is 15, expected at least 16"):
        server_limits(VLLM, 16, 100, False, 15)


def test_where_requests_read_their_own_blocks_all_may_be_shared() -> None:
    """Verifications of eight contexts are one step there, and their graph has a table of bounded size."""
    assert server_limits(VLLM, 16, 100, False, None, own_blocks=True).most_shared_blocks == 99
    assert server_limits(VLLM, 16, 100, False, 20, own_blocks=True).most_shared_blocks == 20
    many = server_limits(engine_config(2048, 256, 1 << 20), 16, 1 << 20, False, None, own_blocks=True)
    assert many.most_shared_blocks * 256 == MOST_SHARED_ENTRIES * 8  # two requests of the longest kind, in any case
    many = server_limits(engine_config(2048, 256, 1 << 17), 16, 1 << 20, False, None, own_blocks=True)
    assert many.most_shared_blocks * 256 == MOST_SHARED_ENTRIES


@pytest.mark.parametrize(("implementation", "expected"), [("auto", True), ("cuda", True), ("reference", False)])
def test_the_reference_multiplies_all_rows_with_all_shared_blocks(implementation: str, expected: bool) -> None:
    config = resolve_config({"ucm": {"attention": {"implementation": implementation}}})
    assert reads_own_blocks(config, "cuda") is expected
    assert not reads_own_blocks(config, "cpu")
    assert not reads_own_blocks(config, "hpu")


def test_a_bucket_file_gives_its_buckets(bucket_file: Path) -> None:
    buckets, _ = chosen(buckets=bucket_file)
    assert set(buckets.forward) == {
        ForwardShape("--u", 8, 0, 40),
        ForwardShape("c--", 32, 0, 0),
        LIMITS.maximum.forward,
    }
    assert buckets.logits == (4, 8)


def test_a_trace_tunes_the_buckets_and_is_the_usage(trace: Path) -> None:
    buckets, usage = chosen(trace=trace, max_graphs=8)
    assert usage is not None
    assert usage.count == 200
    assert any(shape.query_len == 40 for shape in buckets.forward)
    assert buckets.num_graphs <= 8


def test_steps_of_a_trace_that_ran_in_graphs_for_remainders_are_no_usage(tmp_path: Path) -> None:
    path = tmp_path / "tails.jsonl"
    write_log(path, [*mixed_steps(), tail_step(200)])
    _, usage = chosen(trace=path, max_graphs=8)
    assert usage is not None
    assert usage.count == 200


def test_a_trace_beside_another_strategy_is_the_usage_alone(bucket_file: Path, trace: Path) -> None:
    buckets, usage = chosen(buckets=bucket_file, trace=trace)
    assert usage is not None
    assert set(buckets.forward) == set(chosen(buckets=bucket_file)[0].forward)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as a bucket file"),
        ("forward: [", "not YAML"),
        ("- 1", "found schema 'list', expected 'gaudi-ucm.buckets/1'"),
        ("schema: gaudi-ucm.buckets/2", "found schema 'gaudi-ucm.buckets/2', expected 'gaudi-ucm.buckets/1'"),
        ("schema: gaudi-ucm.buckets/1\nlimits: {}", "limits: found {}, expected a mapping with max_num_batched_tokens"),
    ],
)
def test_a_malformed_bucket_file(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "buckets.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BucketFileError, match=f"buckets.yaml: {message}"):
        chosen(buckets=path)


def test_a_bucket_file_for_other_limits(bucket_file: Path) -> None:
    with pytest.raises(BucketFileError, match="made for max_num_seqs 8, the server has 9; start the server with 8, or"):
        chosen(replace(LIMITS, max_num_seqs=9), buckets=bucket_file)


def test_a_bucket_file_of_a_larger_cache_is_cut_to_this_one(bucket_file: Path) -> None:
    """What a start measures differs between starts. covers: B7"""
    here = replace(LIMITS, num_blocks=30, max_shared_blocks=20)
    buckets, _ = chosen(here, buckets=bucket_file)
    assert buckets.forward[-1] == here.maximum.forward
    assert max(shape.unique_blocks for shape in buckets.forward) == 29


def test_a_phase_log_of_another_schema(trace: Path) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([json.dumps({"schema": "gaudi-ucm.phase-log/9"}), *lines[1:], ""]))
    with pytest.raises(PhaseLogError, match=r"phases\.jsonl:1: found 'gaudi-ucm\.phase-log/9'"):
        chosen(trace=trace)


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (Bucket("c--", 65, 0, 0, 1), "query_len 65, the limits allow 64"),
        (Bucket("--u", 8, 0, 8, 9), "logits 9, the limits allow 8"),
    ],
)
def test_a_phase_log_of_a_server_with_larger_steps(tmp_path: Path, bucket: Bucket, message: str) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [of_shape(bucket)])
    with pytest.raises(LimitsError, match=rf"ucm\.graphs\.trace: .*phases\.jsonl: observed steps have {message}"):
        chosen(trace=path)


def test_a_phase_log_without_steps(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [])
    with pytest.raises(LimitsError, match=r"ucm\.graphs\.trace: .*there are no steps"):
        chosen(trace=path)


def test_a_phase_log_of_steps_that_are_divided_here_is_usage_all_the_same(tmp_path: Path) -> None:
    """At true shapes nothing divides steps, and a contiguous slice is longer than the blocks in use. covers: B3"""
    path = tmp_path / "phases.jsonl"
    write_log(path, [of_shape(Bucket("csu", 40, 60, 100, 2))])
    _, usage = chosen(trace=path)
    assert usage is not None
    assert usage.forward.tolist() == [[1, 40, 32, 99]]
