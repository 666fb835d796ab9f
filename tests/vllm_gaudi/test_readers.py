"""Readers of traffic: each kind of log, and errors that name what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_gaudi.servers import CONTIGUOUS, COST, server
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm_tools.vllm_gaudi.demand import check_traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.readers import phase_steps, profiler
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.log import open_log
from vllm_gaudi_ucm_tools.vllm_gaudi.simulation import check_requests, simulate
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Request, Step, Traffic, TrafficError

SMALL = server(2048, 32, 4096, 1000)
# As the profiler writes it: an array that is never closed, and here cut in its last object.
PROFILE = (
    '[{"pid": 1, "ph": "C", "name": "utils", "ts": 1.0, "args": {"prompt_batch_size": 1, "prompt_seq_len": 700, '
    '"prompt_ctx_len": 1024, "prompt_bucket_batch_size": 1, "const_cache_num_blocks": 900, "const_block_size": 128}},'
    '{"pid": 1, "ph": "X", "name": "model_forward_bs1_seq768_ctx8_graphsT", "ts": 1.0, "dur": 2.0, "args": null},'
    '{"pid": 1, "ph": "C", "name": "utils", "ts": 2.0, "args": {"decode_batch_size": 3, "cache_num_blocks_used": 21, '
    '"decode_bucket_ctx_blocks": 64}},{"pid": 1, "ph": "C", "na'
)


def written(folder: Path, text: str, name: str = "log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def lines(*rows: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def test_a_profilers_log_has_steps_and_limits(tmp_path: Path) -> None:
    log = open_log(written(tmp_path, PROFILE))
    assert log.known == {"num_blocks": 900, "block_size": 128}
    found = profiler.traffic(log.text, "x", SMALL)
    assert found.steps == [(Step((Prefill(700, 1024),), 0, 0),), (Step((), 3, 21),)]
    contiguous = server(2048, 32, 4096, 1000, environment=CONTIGUOUS)
    assert profiler.traffic(log.text, "x", contiguous).steps[1][0].highest == 64


def test_a_profilers_log_cannot_tell_drafts(tmp_path: Path) -> None:
    log = open_log(written(tmp_path, PROFILE))
    with pytest.raises(TrafficError, match="which steps had drafts"):
        profiler.traffic(log.text, "x", server(2048, 32, 4096, 1000, drafts=1))


def test_a_result_of_vllm_bench(tmp_path: Path) -> None:
    result = {"num_prompts": 3, "input_lens": [5, 6, 7], "output_lens": [8, 0, 9], "start_times": [12.5, 13.0, 11.0]}
    log = open_log(written(tmp_path, json.dumps(result)))
    assert log.requests == (Request(0.0, 7, 9), Request(1.5, 5, 8))
    assert "1 request without output" in log.notes[0]
    with pytest.raises(TrafficError, match="--save-detailed"):
        open_log(written(tmp_path, json.dumps({"num_prompts": 3, "request_throughput": 1.0})))
    with pytest.raises(TrafficError, match="2 input_lens, 1 output_lens"):
        open_log(written(tmp_path, json.dumps({"input_lens": [1, 2], "output_lens": [3]})))


def test_a_trace_in_mooncakes_form_counts_milliseconds_and_shares_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]},
    ]
    log = open_log(written(tmp_path, lines(*rows)))
    assert log.requests == (Request(0.0, 1100, 2, (0, 1, 2), 512), Request(2.0, 600, 4, (0, 1), 512))
    steps = simulate(log.requests, SMALL, COST)
    assert [prefill for (step,) in steps for prefill in step.prefills] == [Prefill(1100, 0), Prefill(88, 512)]
    assert open_log(written(tmp_path, lines(*rows)), "s").requests[1].arrival == 2000.0


def test_a_trace_of_parts_of_16_tokens_counts_seconds(tmp_path: Path) -> None:
    rows = [{"timestamp": 1 + n, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, 2]} for n in range(2)]
    assert open_log(written(tmp_path, lines(*rows))).requests[1] == Request(1.0, 40, 2, (0, 1, 2), 16)


def test_tables_and_usage(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.03,9,1\n"
    first, second = open_log(written(tmp_path, azure)).requests
    assert (first.prompt, first.output, second.prompt) == (374, 44, 9)
    assert second.arrival == pytest.approx(0.05004, abs=1e-6)
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    )
    assert open_log(written(tmp_path, burst)).requests == (Request(0.0, 472, 18),)
    usage = lines({"created": 7, "usage": {"prompt_tokens": 5, "completion_tokens": 6}})
    assert open_log(written(tmp_path, usage)).requests == (Request(0.0, 5, 6),)


def test_a_description_makes_the_same_requests_each_time(tmp_path: Path) -> None:
    described = {
        "requests": 50,
        "rate": 4,
        "prompt": {"median": 100, "sigma": 1.0, "high": 500},
        "output": 20,
        "prefix": {"tokens": 300, "share": 0.5, "kinds": 2},
    }
    path = written(tmp_path, json.dumps(described, indent=2))
    found = open_log(path).requests
    assert found == open_log(path).requests
    assert len(found) == 50
    assert {request.output for request in found} == {20}
    shared = [request for request in found if request.unit]
    assert 10 < len(shared) < 40
    assert all(300 < request.prompt <= 800 for request in shared)


def test_a_phase_log_becomes_steps(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    assert cli.main(["trace", "--mix", "chat", "--steps", "300", "-o", str(path)]) == 0
    log = open_log(path)
    assert log.known is not None
    assert log.known["max_num_seqs"] == 64
    settings = server(2048, 64, 8192, 3400)
    found = phase_steps.traffic(path, settings)
    assert len(found.steps) == 300
    check_traffic(found, settings)
    with pytest.raises(TrafficError, match="block ids"):
        phase_steps.traffic(path, server(2048, 64, 8192, 3400, prefix_caching=False))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("INFO 11-29 Generated 63 prompt buckets [bs, query, num_blocks]", "neither the lengths of requests"),
        ("name,age\nx,1\n", "its first line is 'name,age'"),
        ('[{"id": 1, "conversations": []}]', "texts of conversations"),
        ('{"traceEvents": []}', "VLLM_PROFILER_ENABLED=full"),
        ('{"a": 1}', "JSON of another kind"),
        ("[1, 2]", "holds int in its array"),
        ('[{"a": 1}]', "array of other objects"),
        ('{"input_length": 5, "output_length": 1}\n{"input_length"', "line 2: malformed JSON"),
        ('{"input_length": 5, "output_length": 1}\n[]', "line 2: has no lengths"),
        ('{"input_length": 5.5, "output_length": 1}', "input_length is 5.5"),
        ('{"input_length": true, "output_length": 1}', "input_length is True"),
        ('{"input_length": 5, "output_length": 1, "timestamp": "soon"}', "time is 'soon'"),
        ('{"requests": 5, "prompt": 3, "output": 2, "speed": 1}', "has speed"),
        ('{"requests": 5, "prompt": {"median": 3, "low": 9, "high": 2}, "output": 2}', "low 9, high 2"),
        ('{"requests": 0, "prompt": 3, "output": 2}', "requests is 0"),
        ('{"requests": 5, "prompt": 3, "output": 2, "rate": -1}', "rate is -1"),
        ("ContextTokens,GeneratedTokens\n1\n", "GeneratedTokens is None"),
    ],
)
def test_a_log_of_the_wrong_kind_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TrafficError, match=message):
        open_log(written(tmp_path, text))


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrafficError, match="no text"):
        open_log(path)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0.0, 0, 5), "request 1 has 0 prompt"),
        (Request(0.0, 5, 0), "0 output tokens"),
        (Request(0.0, 4000, 97), "--drop-longer"),
    ],
)
def test_impossible_lengths_are_named(request_: Request, message: str) -> None:
    with pytest.raises(TrafficError, match=message):
        check_requests([request_], SMALL, "log")
    with pytest.raises(TrafficError, match="the cache holds 1152"):
        check_requests([Request(0.0, 1200, 5)], server(2048, 32, 4096, 10), "log")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step((Prefill(4000, 0),), 0, 0), "a prompt of 4000 tokens"),
        (Step((Prefill(100, 4000),), 0, 0), "a request of 4100 tokens"),
        (Step((), 33, 40), "33 decodes"),
        (Step((), 2, 1), "2 decodes with 1 blocks"),
        (Step((), 2, 9, 1001), "block 1000"),
    ],
)
def test_a_step_of_another_server_is_named(step: Step, message: str) -> None:
    with pytest.raises(TrafficError, match=message):
        check_traffic(Traffic("log", [(Step((), 1, 1),), (step,)]), SMALL)
