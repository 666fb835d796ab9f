"""The replay of an agents' trace: prompts with equal beginnings, load, times, and the table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import agent_first_token
from benchmarks.agent_figures import Run
from benchmarks.agent_first_token import SIDES, TRAFFIC, engine_options, main, parse, side_options
from benchmarks.agent_first_token_side import first_tokens, prompts_of
from benchmarks.engine_side import SideFailed
from vllm_gaudi_ucm_tools.store.traffic_log import LoggedRequest, TrafficLog, read_traffic

SMALL = TRAFFIC["cpu"]


@pytest.fixture
def log(tmp_path: Path) -> TrafficLog:
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in SMALL.lines()))
    return read_traffic(path, SMALL.block_tokens)


class FakeEngine:
    """Answers each request with one token, two steps after it came."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
        self.llm_engine = self
        self.waiting: dict[str, Any] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.waiting[name] = [2, prompt["prompt_token_ids"]]
        self.most = max(self.most, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def get_num_unfinished_requests(self) -> int:
        return len(self.waiting)

    def step(self) -> list[Any]:
        for state in self.waiting.values():
            state[0] -= 1
        done = {name: state[1] for name, state in self.waiting.items() if state[0] == 0}
        for name in done:
            del self.waiting[name]
        half = {name: len(prompt) // 2 for name, prompt in done.items()}
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[1])],
                num_cached_tokens=half[name],
                prompt_token_ids=prompt,
            )
            for name, prompt in done.items()
        ]


def test_equal_blocks_are_equal_tokens(log: TrafficLog) -> None:
    prompts = list(prompts_of(log, 1000, 0))
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in log.requests]
    assert all(one[:256] == prompts[0][:256] for one in prompts)
    assert next(prompts_of(log, 1000, 1)) != prompts[0]
    unit = log.unit_tokens
    for (one, a), (other, b) in itertools.pairwise(zip(prompts, log.requests, strict=True)):
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.prompt, b.prompt)))  # noqa: B905
        assert one[: common * unit] == other[: common * unit]


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    """Prompts of 6 and 9 tokens in blocks of 4: the short block of the first has an id of its own."""
    blocks = {6: [0, 1], 9: [0, 2, 3], 7: [4, 1]}
    requests = [LoggedRequest(0.0, np.array(ids), tokens, None, 1) for tokens, ids in blocks.items()]
    first, second, other = prompts_of(TrafficLog("mooncake", 4, requests), 1000, 0)
    assert second[:6] == first
    assert (other[:4] != first[:4], other[4:6]) == (True, first[4:6])


@pytest.mark.parametrize("at_once", [1, 4])
def test_every_request_has_a_time(log: TrafficLog, at_once: int) -> None:
    engine = FakeEngine()
    found = first_tokens(engine, log, at_once, 4, 0)
    assert len(found) == len(log.requests)
    assert engine.most == at_once
    assert all(one["ms"] > 0 and one["cached"] == pytest.approx(0.5, abs=0.01) for one in found)


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ratios are of one round each; a round without the first side has none."""
    times = {(0, "none"): 4.0, (0, "memory"): 1.0, (1, "memory"): 5.0, (1, "none"): 10.0, (2, "memory"): 9.0}

    def measured(args: Any) -> Any:
        assert args.trace.is_file()
        runs = [Run(round_, side, "low", [{"ms": ms, "cached": 0.9}]) for (round_, side), ms in times.items()]
        return runs, {"file": "the worker of file ended"}

    monkeypatch.setattr(agent_first_token, "measure", measured)
    assert main(["--plot", str(tmp_path / "ratios.png")]) == 1
    printed = capsys.readouterr().out
    assert "0.38 (0.25 to 0.50)" in printed
    assert "file: left out. the worker of file ended" in printed
    assert (tmp_path / "ratios.png").stat().st_size > 1000


class FakeSide:
    """Answers orders as an engine of a side does; `memory` dies at its third replay."""

    begun: ClassVar[list[tuple[str, int, int | None]]] = []
    stopped: ClassVar[list[str]] = []

    def __init__(self, name: str, *others: Any, **options: Any) -> None:
        self.name = name

    def start(self) -> tuple[float, dict[str, Any]]:
        if self.name == "tiered":
            raise SideFailed("the worker of tiered ended")
        return 1.0, {}

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["most_requests"] is None:
            FakeSide.begun.append((self.name, order["seed"], order["at_once"]))
            if len(FakeSide.begun) == 3:
                raise SideFailed("the worker of memory ended")
        return {"requests": [{"ms": 1.0, "cached": 0.0}]}

    def stop(self) -> None:
        FakeSide.stopped.append(self.name)


def test_sides_take_turns_and_a_second_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, log: TrafficLog
) -> None:
    """Each round begins with another side, a side that fails is left out with its reason, and what the file has is not
    measured again.
    """
    monkeypatch.setattr(agent_first_token, "EngineSide", FakeSide)
    monkeypatch.setattr(FakeSide, "begun", [])
    monkeypatch.setattr(FakeSide, "stopped", [])
    file, trace = tmp_path / "runs.json", str(tmp_path / "agents.jsonl")
    given = ["--shape", "small", "--trace", trace, "--rounds", "2", "--loads", "low", "--json", str(file)]
    args = parse([*given, "--sides", "none", "memory", "tiered"])
    runs, failed = agent_first_token.measure(args)
    assert FakeSide.begun == [("none", 0, 1), ("memory", 0, 1), ("memory", 10, 1), ("none", 10, 1)]
    assert failed == {"tiered": "the worker of tiered ended", "memory": "the worker of memory ended"}
    assert len(runs) == 3
    assert {"tiered", "memory"} <= set(FakeSide.stopped[:2])
    runs, failed = agent_first_token.measure(parse([*given, "--sides", "none", "memory"]))
    assert (len(runs), failed, FakeSide.begun[4:]) == (4, {}, [("memory", 10, 1)])
    assert "tiered: left out. the worker of tiered ended" in capsys.readouterr().err


def test_a_gpu_gets_long_prompts_and_its_own_sizes(tmp_path: Path) -> None:
    """An H200 serves prompts of 20K to 100K tokens, of which most have been seen before, and its cache holds one."""
    args = parse(["--device", "cuda", "--layers", "8"])
    lengths = [line["input_length"] for line in TRAFFIC["cuda"].lines()]
    assert (min(lengths), max(lengths) > 90_000) == (20_000, True)
    model = agent_first_token.write_model(tmp_path, max(lengths), args)
    options = engine_options("memory mode", model, str(tmp_path), max(lengths) + 4, args)
    assert options["max_model_len"] <= args.device_tokens
    assert options["kv_cache_memory_bytes"] == args.device_tokens * 8 * 2 * 8 * 128 * 2
    assert options["additional_config"]["ucm"].keys() == {*agent_first_token.MEMORY_MODE, "graphs"}
    assert (options["dtype"], options["load_format"]) == ("bfloat16", "dummy")


@pytest.mark.parametrize("given", [["--model", "m", "--shape", "8b"], ["--model", "m", "--layers", "2"]])
def test_a_model_with_weights_has_its_own_shape(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(given)
    assert "--shape and --layers are of random ones" in capsys.readouterr().err


def test_each_side_is_different(tmp_path: Path) -> None:
    sides = [repr(side_options(side, str(tmp_path), parse([]))) for side in SIDES]
    assert len(set(sides)) == len(sides)


def test_lmcache_is_left_out_without_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides: list[str] = []
    monkeypatch.setattr(agent_first_token, "measure", lambda args: (sides.extend(args.sides) or [], {}))
    monkeypatch.setattr(agent_first_token, "find_spec", lambda name: None)
    assert main(["--sides", "none", "LMCache"]) == 0
    assert sides == ["none"]
    assert "LMCache: left out, because the package lmcache is not installed" in capsys.readouterr().err
