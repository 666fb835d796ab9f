"""Profiles of an engine: torch's trace has the phases of each step, with the sizes at which they run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.async_drafts import drafted_by
from tests.engine.serving import Engine
from tests.engine.static_shapes import shapes, static
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError

PROMPT = [5, 6, 7, 8] * 5


def profiler(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_with_stack": False,
            **options,
        }
    }


def trace_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt.trace.json.gz"))


def phases(trace: Path) -> list[str]:
    """Names of the ranges that a user recorded, in the order of time."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(ranges, key=lambda event: float(event["ts"]))]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_phases_of_steps(tiny_llama: Path, tmp_path: Path, async_scheduling: bool) -> None:
    with Engine(tiny_llama, async_scheduling=async_scheduling, **profiler(tmp_path)) as engine:
        before = engine.greedy([PROMPT], 3)
        engine.llm.start_profile("first")
        assert engine.greedy([PROMPT], 3)[0].tokens == before[0].tokens
        engine.llm.stop_profile()
        # between two profiles nothing is recorded
        engine.greedy([PROMPT], 3)
        engine.llm.start_profile()
        engine.greedy([PROMPT], 1)
        engine.llm.stop_profile()
        named, other = sorted(trace_files(tmp_path), key=lambda file: not file.name.startswith("first_"))
        assert named.name.startswith("first_")
        found = phases(named)
        # a prompt of 20 tokens, of which a block of 16 is cached, and two decodes
        forwards = [name for name in found if name.startswith("forward")]
        assert [name.split()[1:3] for name in forwards] == [["cs-", "q4"], ["--u", "q1"], ["--u", "q1"]]
        assert forwards[0] == "forward cs- q4 s1 logits 1"
        for phase in ("plan", "logits", "sample", "finish"):
            assert found.count(phase) >= 3
        assert found.index("plan") < found.index(forwards[0]) < found.index("logits")
        assert found.index("logits") < found.index("sample") < found.index("finish")
        assert [name for name in phases(other) if name.startswith("forward")] == ["forward cs- q4 s1 logits 1"]


def test_buckets_and_drafts(tiny_llama: Path, tmp_path: Path) -> None:
    """A step at static shapes has the name of the bucket in which it runs."""
    with Engine(
        tiny_llama, static(), speculative_config=drafted_by(tiny_llama), async_scheduling=False, **profiler(tmp_path)
    ) as engine:
        engine.llm.start_profile()
        engine.greedy([PROMPT], 6)
        engine.llm.stop_profile()
        (trace,) = trace_files(tmp_path)
        forwards = [name for name in phases(trace) if name.startswith("forward")]
        assert 0 < len(forwards) < 6, "drafts were accepted"
        warm = set(shapes(engine).execution.ready.buckets.forward)
        for name in forwards:
            _, phase, query, *_ = name.split()
            assert any(bucket.phase == phase and f"q{bucket.query_len}" == query for bucket in warm)
        assert phases(trace).count("sample") == len(forwards)


def test_drafts_that_are_verified_later(tiny_llama: Path, tmp_path: Path) -> None:
    """Another thread samples steps with drafts: the trace has its phases, too."""
    options = {"async_scheduling": True, "speculative_config": drafted_by(tiny_llama)}
    with Engine(tiny_llama, **options, **profiler(tmp_path)) as engine:
        engine.llm.start_profile()
        engine.greedy([PROMPT], 6)
        engine.llm.stop_profile()
        (trace,) = trace_files(tmp_path)
        found = phases(trace)
        forwards = [name for name in found if name.startswith("forward")]
        assert found.count("sample") == found.count("finish") == len(forwards) > 0


def test_bounds_of_a_session(tiny_llama: Path, tmp_path: Path) -> None:
    """A profile begins after some steps and ends by itself."""
    with Engine(tiny_llama, **profiler(tmp_path)) as engine:
        engine.llm.start_profile("some", delay_iterations=2, max_iterations=2)
        engine.greedy([PROMPT], 12)
        (trace,) = trace_files(tmp_path)
        assert len([name for name in phases(trace) if name.startswith("forward")]) == 2
        engine.llm.stop_profile()
        assert trace_files(tmp_path) == [trace]


def test_bad_input_leaves_the_engine_alone(tiny_llama: Path, tmp_path: Path) -> None:
    with Engine(tiny_llama, **profiler(tmp_path)) as engine:
        for call in ({"profile_prefix": "../up"}, {"max_iterations": -1}):
            with pytest.raises(ValueError, match=r"profile_prefix|max_iterations"):
                engine.llm.start_profile(**call)
            with pytest.raises(ValueError, match=r"profile_prefix|max_iterations"):
                engine.llm.collective_rpc("profile", args=(True,), kwargs=call)
        engine.llm.stop_profile()
        engine.llm.start_profile()
        engine.greedy([PROMPT], 2)
        engine.llm.stop_profile()
        assert len(trace_files(tmp_path)) == 1


def test_an_engine_without_a_profiler(tiny_llama: Path) -> None:
    with Engine(tiny_llama) as engine:
        with pytest.raises(UnsupportedCallError, match="start the engine with --profiler-config"):
            engine.llm.start_profile()
        assert len(engine.greedy([PROMPT], 2)[0].tokens) == 2
