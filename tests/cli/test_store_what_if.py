"""`gaudi-ucm store what-if` and `agent-trace`: against a simulation with whole prefixes as keys, and bad logs."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm_tools.store.agent_trace import AgentTraffic
from vllm_gaudi_ucm_tools.store.hit_simulation import BlockChains, simulate
from vllm_gaudi_ucm_tools.store.traffic_log import LoggedRequest, TrafficLog, TrafficLogError, read_traffic

Capture = pytest.CaptureFixture[str]


def command(capsys: Capture, *arguments: str) -> tuple[int, str]:
    code = cli.main(["store", *arguments])
    written = capsys.readouterr()
    return code, written.out if code == 0 else written.err


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def brute_force(prompts: list[list[int]], answers: list[list[int]], size: int, most: int) -> tuple[int, int, int]:
    """Loaded, saved and evicted blocks of an LRU store whose keys are the tokens of whole prefixes. A request that ends
    uses them from the last to the first.
    """
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    loaded = saved = evicted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        for end in range(size, len(prompt), size):
            if tuple(prompt[:end]) not in held:
                break
            loaded += 1
        known = prompt + answer[:-1]
        for end in range(size, len(known) + 1, size):
            saved += tuple(known[:end]) not in held
            held[tuple(known[:end])] = None
            held.move_to_end(tuple(known[:end]))
            if len(held) > most:
                held.popitem(last=False)
                evicted += 1
        for end in range(len(known) // size * size, 0, -size):
            if tuple(known[:end]) in held:
                held.move_to_end(tuple(known[:end]))
    return loaded, saved, evicted


small = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None, database=None)
@given(
    requests=st.lists(st.tuples(small, st.lists(st.integers(0, 1), max_size=5)), min_size=1, max_size=8),
    size=st.integers(1, 4),
    most=st.integers(0, 9),
)
def test_figures_are_a_brute_force_simulation(
    requests: list[tuple[list[int], list[int]]], size: int, most: int
) -> None:
    prompts, answers = [list(prompt) for prompt, _ in requests], [list(answer) for _, answer in requests]
    logged = [
        LoggedRequest(0.0, np.asarray(prompt, np.int64), len(prompt), np.asarray(answer, np.int64), len(answer))
        for prompt, answer in requests
    ]
    chains = BlockChains(TrafficLog("tokens", 1, logged), size)
    found = simulate(chains, most)
    expected = brute_force(prompts, answers, size, most) if most else (0, 0, 0)
    assert (found.loaded_blocks, found.saved_blocks, found.evicted_blocks) == expected
    assert found.stored_tokens == found.loaded_blocks * size
    assert found.peak_blocks <= most
    # what the device's cache finds is not asked of the store
    device = simulate(chains, None, 10**6)
    assert (device.stored_tokens, device.device_tokens) == (0, simulate(chains, None).stored_tokens)


def test_partial_hits_and_sizes_of_blocks() -> None:
    def request(*tokens: int) -> LoggedRequest:
        return LoggedRequest(0.0, np.asarray(tokens, np.int64), len(tokens), None, 0)

    log = TrafficLog("tokens", 1, [request(1, 2, 3, 4, 5, 6, 7, 8, 9), request(1, 2, 3, 4, 5, 6, 0, 0, 0)])
    found = simulate(BlockChains(log, 4), None, 100)
    assert (found.device_tokens, found.stored_tokens, found.partial_tokens) == (4, 0, 2)
    traced = TrafficLog("mooncake", 4, [request(7, 8, 9), request(7, 8, 5)])
    for one in traced.requests:
        object.__setattr__(one, "prompt_tokens", 11)
    halves = simulate(BlockChains(traced, 2), None)
    assert (halves.stored_tokens, halves.partial_tokens) == (8, None)
    pairs = simulate(BlockChains(traced, 8), None, 100)
    assert (pairs.device_tokens, pairs.partial_tokens) == (8, 0)
    with pytest.raises(ValueError, match=r"--block-size 3: .* multiple or a divisor"):
        BlockChains(traced, 3)


def test_the_formats(tmp_path: Path) -> None:
    mooncake = {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
    log = read_traffic(write(tmp_path / "a", mooncake, {**mooncake, "timestamp": 500}, ""))
    assert (log.kind, log.unit_tokens, [one.seconds for one in log.requests]) == ("mooncake", 512, [0.5, 2.0])
    bailian = {"chat_id": 1, "timestamp": 2.5, "input_length": 17, "output_length": 5, "hash_ids": [3, 4]}
    log = read_traffic(write(tmp_path / "b", bailian))
    assert (log.kind, log.unit_tokens, log.requests[0].seconds) == ("bailian", 16, 2.5)
    log = read_traffic(write(tmp_path / "c", {"prompt_token_ids": [1, 2], "output_token_ids": [3]}))
    assert (log.kind, log.requests[0].prompt.tolist(), log.requests[0].answer_tokens) == ("tokens", [1, 2], 1)
    text = write(tmp_path / "d", {"prompt": "ab", "output": "c"})
    log = read_traffic(text, encode=lambda text: [ord(letter) for letter in text])
    assert (log.kind, log.requests[0].prompt.tolist()) == ("text", [97, 98])
    with pytest.raises(TrafficLogError, match="give --tokenizer"):
        read_traffic(text)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "found no request"),
        ("{", "line 1: not JSON"),
        ("[1]", "found list"),
        ({"schema": "gaudi-ucm.phase-log/1", "prompt": 1}, "a phase log, which has the sizes of steps"),
        ({"other": 1}, "found the keys other"),
        (
            {"hash_ids": [1], "input_length": 600, "output_length": 1},
            "1 hash_ids for input_length 600, expected 2 blocks",
        ),
        ({"hash_ids": [], "input_length": 0, "output_length": 1}, "input_length is 0"),
        ({"hash_ids": [1], "input_length": 5, "output_length": -1}, "output_length is -1"),
        ({"hash_ids": [1], "input_length": 10**12, "output_length": 1}, "input_length is 1000000000000"),
        ({"hash_ids": ["x"], "input_length": 5, "output_length": 1}, "hash_ids is not a list of whole numbers"),
        ({"hash_ids": [1], "input_length": 5, "output_length": 1, "timestamp": "noon"}, "timestamp is 'noon'"),
        ({"prompt_token_ids": []}, "an empty prompt"),
        ({"prompt_token_ids": [1], "output_token_ids": [2], "output_length": 9}, "output_length 9 with 1 tokens"),
    ],
)
def test_bad_logs_are_named(tmp_path: Path, capsys: Capture, line: Any, named: str) -> None:
    code, text = command(capsys, "what-if", str(write(tmp_path / "log.jsonl", line)))
    assert code == 2
    assert named in text


def test_a_table_and_a_picture_of_agents(tmp_path: Path, capsys: Capture) -> None:
    trace, picture = tmp_path / "agents.jsonl", tmp_path / "hits.png"
    code, text = command(capsys, "agent-trace", "-o", str(trace), "--sessions", "3", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["reuse"] > 0.85
    assert found["least_tokens"] == 20_000
    assert 90_000 < found["most_tokens"] <= 100_000
    given = ["what-if", str(trace), "--capacity", "1GiB", "100TiB", "--token-bytes", "1000"]
    code, text = command(capsys, *given, "--json", "--plot", str(picture))
    small, large, unbounded = json.loads(text)["stores"]
    assert small["hit_rate"] <= large["hit_rate"] == unbounded["hit_rate"] > 0.85
    assert small["peak_bytes"] <= 1 << 30
    assert unbounded["saved_bytes"] == unbounded["peak_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, text = command(capsys, *given)
    assert "agents.jsonl" in text
    assert "take room in the store" in text


def test_a_seed_is_one_trace() -> None:
    assert AgentTraffic(sessions=1).lines() == AgentTraffic(sessions=1).lines() != AgentTraffic(1, seed=1).lines()
    with pytest.raises(ValueError, match="--shared-tokens below --first-tokens"):
        AgentTraffic(first_tokens=5)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--capacity", "much"], "--capacity: found 'much'"),
        (["--block-size", "0"], "--block-size is 0"),
        (["--token-bytes", "0"], "--token-bytes is 0"),
        (["--trace-block-tokens", "0"], "--trace-block-tokens is 0"),
        (["--trace-block-tokens", "16"], "leave out --trace-block-tokens"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
        (["--plot", "a.txt"], "--plot a.txt"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, capsys: Capture, option: list[str], named: str) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt_token_ids": [1, 2]})
    code, text = command(capsys, "what-if", str(log), *option)
    assert code == 2
    assert named in text
