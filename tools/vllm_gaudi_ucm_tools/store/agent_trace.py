"""`gaudi-ucm store agent-trace`: writes synthetic traffic of agents in Mooncake's trace format.

A session begins with a system prompt that all sessions share and a task of its own. Each turn appends the model's
answer and a tool's output, so the next prompt begins with all of the last one. Some turns branch: sub-agents continue
from the same context, each by itself, and then the session goes on with their summaries.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gaudi_ucm_tools.output import check_output, written_whole
from vllm_gaudi_ucm_tools.store.hit_simulation import BlockChains, simulate
from vllm_gaudi_ucm_tools.store.traffic_log import read_traffic


@dataclass(frozen=True)
class AgentTraffic:
    """The parameters of the traffic. Lengths that vary are drawn from a gamma distribution of shape 2."""

    sessions: int = 16
    shared_tokens: int = 8_000
    first_tokens: int = 20_000
    most_tokens: int = 100_000
    tool_tokens: int = 3_500
    answer_tokens: int = 400
    branch_percent: int = 10
    branches: int = 3
    branch_turns: int = 2
    gap_ms: int = 15_000
    session_gap_ms: int = 30_000
    block_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("shared_tokens", "branch_percent", "branches", "branch_turns", "seed") else 1
            value = getattr(self, field.name)
            if value < least:
                raise ValueError(f"{option_of(field.name)} is {value}, expected at least {least}")
        if not self.shared_tokens < self.first_tokens <= self.most_tokens:
            found = f"{self.shared_tokens}, {self.first_tokens} and {self.most_tokens}"
            expected = "--shared-tokens below --first-tokens, and those at most --most-tokens"
            raise ValueError(f"found {found}, expected {expected}")
        if self.branch_percent > 100:
            raise ValueError(f"--branch-percent is {self.branch_percent}, expected at most 100")

    def lines(self) -> list[dict[str, Any]]:
        """Returns the requests in the order of their arrival: one object of the format each."""
        requests = sorted(self._requests(), key=lambda request: request[0])
        ids = _BlockIds(self.block_tokens)
        return [
            {
                "timestamp": int(time),
                "input_length": len(prompt),
                "output_length": answer,
                "hash_ids": ids.of_prompt(prompt),
            }
            for time, prompt, answer in requests
        ]

    def _requests(self) -> Iterator[tuple[float, np.ndarray, int]]:
        """Yields time, prompt (a number for each token) and length of the answer, session by session."""
        generator = np.random.default_rng(self.seed)
        tokens = _NewTokens()
        shared, start = tokens.take(self.shared_tokens), 0.0
        for _ in range(self.sessions):
            start += generator.exponential(self.session_gap_ms)
            prompt = np.concatenate((shared, tokens.take(self.first_tokens - self.shared_tokens)))
            time = start
            while len(prompt) <= self.most_tokens:
                answer = _length(generator, self.answer_tokens)
                yield time, prompt, answer
                prompt = np.concatenate((prompt, tokens.take(answer)))
                time += generator.exponential(self.gap_ms)
                if 100 * generator.random() < self.branch_percent:
                    for _ in range(self.branches):
                        yield from self._branch(generator, tokens, time, prompt)
                    time += self.branch_turns * self.gap_ms
                prompt = np.concatenate((prompt, tokens.take(_length(generator, self.tool_tokens))))

    def _branch(
        self, generator: np.random.Generator, tokens: _NewTokens, time: float, prompt: np.ndarray
    ) -> Iterator[tuple[float, np.ndarray, int]]:
        for _ in range(self.branch_turns):
            prompt = np.concatenate((prompt, tokens.take(_length(generator, self.tool_tokens))))
            if len(prompt) > self.most_tokens:
                return
            answer = _length(generator, self.answer_tokens)
            yield time, prompt, answer
            prompt = np.concatenate((prompt, tokens.take(answer)))
            time += generator.exponential(self.gap_ms)


class _NewTokens:
    """Numbers of tokens, each given once: equal numbers are the same token of the same text."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> np.ndarray:
        self._next += count
        return np.arange(self._next - count, self._next)


class _BlockIds:
    """Ids of blocks, counted up: equal ids mean equal tokens from the first one on. The last block may be short."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, int, int], int] = {}

    def of_prompt(self, prompt: np.ndarray) -> list[int]:
        found, parent = [], -1
        for start in range(0, len(prompt), self._block_tokens):
            end = min(start + self._block_tokens, len(prompt))
            # each token is followed by the same ones up to a branch, so that the last one and the length identify it
            parent = self._ids.setdefault((parent, int(prompt[end - 1]), end - start), len(self._ids))
            found.append(parent)
        return found


def _length(generator: np.random.Generator, mean: int) -> int:
    return max(1, round(generator.gamma(2.0, mean / 2)))


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


_HELP = {
    "sessions": "number of sessions",
    "shared_tokens": "tokens of the system prompt that all sessions share",
    "first_tokens": "tokens of a session's first prompt",
    "most_tokens": "a session ends when its next prompt would be longer",
    "tool_tokens": "mean tokens of a tool's output",
    "answer_tokens": "mean tokens of an answer",
    "branch_percent": "turns that branch, of a hundred",
    "branches": "sub-agents of such a turn",
    "branch_turns": "turns of a sub-agent",
    "gap_ms": "mean milliseconds between turns",
    "session_gap_ms": "mean milliseconds between the starts of sessions",
    "block_tokens": "tokens of a block of the trace",
    "seed": "the same seed gives the same trace",
}


def add_agent_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares an option for each parameter."""
    for field in fields(AgentTraffic):
        text = f"{_HELP[field.name]} (default: %(default)s)"
        parser.add_argument(option_of(field.name), type=int, default=field.default, metavar="N", help=text)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def agent_trace(args: argparse.Namespace) -> int:
    """Writes the trace and prints what it holds. Raises a ValueError that names the option."""
    traffic = AgentTraffic(**{field.name: getattr(args, field.name) for field in fields(AgentTraffic)})
    check_output("--output", args.output)
    lines = traffic.lines()
    with written_whole(args.output) as path:
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    log = read_traffic(args.output, traffic.block_tokens) if args.output.is_file() else None
    lengths = [line["input_length"] for line in lines]
    found: dict[str, Any] = {"requests": len(lines), "least_tokens": min(lengths), "most_tokens": max(lengths)}
    if log is not None:
        figures = simulate(BlockChains(log, traffic.block_tokens), None)
        found["reuse"] = figures.stored_tokens / figures.prompt_tokens
    if args.json:
        print(json.dumps({"trace": str(args.output), **found}, indent=2))
    else:
        reuse = f", {found['reuse']:.1%} of their tokens seen before" if log is not None else ""
        sizes = f"prompts of {min(lengths):,} to {max(lengths):,} tokens"
        print(f"{args.output}: {len(lines):,} requests, {sizes}{reuse}")
    return 0
