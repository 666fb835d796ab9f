"""Time to the first token on a trace of agents: without a store, with our stores, and with others.

Sides are our stores, partial hits, memory mode, vLLM's offloading, and LMCache if its package is installed.
`python -m benchmarks.agent_first_token --model FOLDER [--trace FILE] [--sides ...] [--loads low high] [--rounds 5]`.
The trace is in Mooncake's format; `gaudi-ucm store agent-trace` writes such. Each block id becomes random tokens of
its own. Each side is an engine in a process of its own, whose prefix cache holds `--device-tokens`. A round has every
side once, and each round begins with another side. Figures are medians of the rounds, with the least and the most.
At low load requests come one by one, at high load `--at-once` of them are always in the engine. `--json` keeps every
run; the same command then goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import numpy as np
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.store.agent_trace import AgentTraffic
from vllm_gaudi_ucm_tools.store.traffic_log import TrafficLog, read_traffic

SIDES = ("none", "memory", "file", "tiered", "partial hits", "memory mode", "vLLM's offloading", "LMCache")
LOADS = ("low", "high")
PASSED = (
    *("model", "dtype", "load_format", "trace", "trace_block_tokens", "block_size", "step_tokens", "device_tokens"),
    *("cache_bytes", "store_bytes", "at_once", "most_answer"),
)
"""Options that the process of a side gets."""
MEMORY_MODE = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 512}},
    "memory_mode": {"enabled": True},
}


class Run(NamedTuple):
    """The requests of a side in one round, at one load: milliseconds to the first token (`ms`), and the cached share of
    the prompt (`cached`).
    """

    round: int
    side: str
    load: str
    requests: list[dict[str, float]]


def engine_options(side: str, folder: str, store_bytes: int, block_size: int) -> dict[str, Any]:
    """Returns what an engine of a side is started with, in addition to what all have."""
    file = {"kind": "file", "path": f"{folder}/store", "capacity": store_bytes, "deadline": 10.0, "fsync": False}
    stores: dict[str, dict[str, Any]] = {
        "memory": {"kind": "memory", "capacity": store_bytes},
        "file": file,
        # a quarter of the blocks in memory
        "tiered": {"kind": "tiered", "front": {"capacity": store_bytes // 4}, "behind": file},
    }
    if side in stores:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="UcmConnector",
            kv_connector_module_path="vllm_gaudi_ucm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"store": stores[side]},
        )
        return {"kv_transfer_config": transfer}
    if side == "partial hits":
        return {"additional_config": {"ucm": {"kv_cache": {"partial_hits": True}}}}
    if side == "memory mode":
        return {"additional_config": {"ucm": MEMORY_MODE}}
    if side == "LMCache":
        from vllm.config import KVTransferConfig

        # its own chunks, of 256 tokens, would find less of a short prompt than blocks do
        options = {"lmcache.chunk_size": block_size, "lmcache.max_local_cpu_size": store_bytes / 2**30}
        transfer = KVTransferConfig(
            kv_connector="LMCacheConnectorV1", kv_role="kv_both", kv_connector_extra_config=options
        )
        return {"kv_transfer_config": transfer}
    if side == "vLLM's offloading":
        return {"kv_offloading_size": store_bytes / 2**30, "kv_offloading_backend": "native"}
    return {}


def prompts_of(log: TrafficLog, vocabulary: int, round_: int) -> Iterator[list[int]]:
    """Yields the tokens of each prompt: each block id has random ones, others in each round.

    The last block of a prompt may be short. What follows the same blocks later begins with its tokens, because a turn
    of an agent goes on where the last one ended; ids do not say so.
    """
    tokens: dict[int, np.ndarray] = {}
    short: dict[int, np.ndarray] = {}  # by the id of the block before it
    for request in log.requests:
        numbers = [int(number) for number in request.prompt]
        for before, number in itertools.pairwise([-1, *numbers]):
            if number not in tokens:
                generator = np.random.default_rng([round_, number])
                tokens[number] = generator.integers(3, vocabulary, log.unit_tokens)
                begin = short.get(before, tokens[number][:0])
                tokens[number][: len(begin)] = begin
        prompt = np.concatenate([tokens[number] for number in numbers])[: request.prompt_tokens]
        if rest := len(prompt) % log.unit_tokens:
            short[[-1, *numbers][-2]] = prompt[-rest:]
        yield prompt.tolist()


def first_tokens(engine: Any, log: TrafficLog, at_once: int, most_answer: int, round_: int) -> list[dict[str, float]]:
    """Returns milliseconds to the first token, and the cached share of the prompt, of each request in order."""
    from vllm import SamplingParams

    waiting = iter(enumerate(prompts_of(log, engine.model_config.get_vocab_size(), round_)))
    begun: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    core, is_over = engine.llm_engine, False
    while not is_over or core.has_unfinished_requests():
        while not is_over and core.get_num_unfinished_requests() < at_once:
            number, prompt = next(waiting, (-1, []))
            is_over = number < 0
            if not is_over:
                answer = max(1, min(most_answer, log.requests[number].answer_tokens))
                params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
                name = f"{round_}-{at_once}-{number}"
                begun[name] = time.perf_counter()
                core.add_request(name, {"prompt_token_ids": prompt}, params)
        for output in core.step():
            if output.request_id not in found and output.outputs and output.outputs[0].token_ids:
                spent = time.perf_counter() - begun[output.request_id]
                cached = (output.num_cached_tokens or 0) / len(output.prompt_token_ids)
                found[output.request_id] = {"ms": 1e3 * spent, "cached": cached}
    return [found[name] for name in begun]


def measure_side(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Runs each load on a new engine of one side, by load."""
    from vllm import LLM

    log = read_traffic(args.trace, args.trace_block_tokens)
    longest = max(request.prompt_tokens for request in log.requests) + args.most_answer
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            str(args.model),
            dtype=args.dtype,
            load_format=args.load_format,
            skip_tokenizer_init=True,
            max_model_len=-(-longest // args.block_size) * args.block_size,
            max_num_seqs=max(2, args.at_once),
            max_num_batched_tokens=args.step_tokens,
            block_size=args.block_size,
            num_gpu_blocks_override=args.device_tokens // args.block_size,
            kv_cache_memory_bytes=args.cache_bytes,
            disable_log_stats=True,
            **engine_options(args.side, folder, args.store_bytes, args.block_size),
        )
        found = {}
        # the first, short one meets the shapes of steps
        warm = TrafficLog(log.kind, log.unit_tokens, log.requests[:1])
        first_tokens(engine, warm, 1, args.most_answer, 1_000_000 + args.round)
        for number, load in enumerate(args.loads):
            engine.reset_prefix_cache()
            at_once = args.at_once if load == "high" else 1
            found[load] = first_tokens(engine, log, at_once, args.most_answer, 10 * args.round + number)
        core: Any = engine.llm_engine.engine_core
        core.shutdown()
    return found


def measure(args: argparse.Namespace) -> list[Run]:
    """Starts a process for each side and round that `--json` does not have yet; returns the runs of all."""
    runs = read_runs(args.json)
    done = {(run.round, run.side) for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            first = round_ % len(args.sides)
            for side in [*args.sides[first:], *args.sides[:first]]:
                if (round_, side) in done:
                    continue
                output = Path(folder) / "side.json"
                command = [sys.executable, "-m", "benchmarks.agent_first_token", "--side", side, "--round", str(round_)]
                for name in PASSED:
                    command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
                command += ["--loads", *args.loads, "--json", str(output)]
                ended = subprocess.run(command, capture_output=True, text=True)
                if ended.returncode:
                    raise RuntimeError(f"side {side}: exit code {ended.returncode}:\n{ended.stderr[-4000:]}")
                found = json.loads(output.read_text())
                runs += [Run(round_, side, load, requests) for load, requests in found.items()]
                if args.json:
                    args.json.write_text(json.dumps([run._asdict() for run in runs]) + "\n")
    return runs


def read_runs(path: Path | None) -> list[Run]:
    return [Run(**run) for run in json.loads(path.read_text())] if path is not None and path.exists() else []


class Figures(NamedTuple):
    """Figures of a side at one load; each has a number for every round.

    median, mean, p90: milliseconds to the first token. cached: share of prompt tokens that were not computed. ratio:
    the mean, divided by the mean of the first side in the same round.
    """

    median: list[float]
    mean: list[float]
    p90: list[float]
    cached: list[float]
    ratio: list[float]


def figures_of(runs: Sequence[Run]) -> dict[str, dict[str, Figures]]:
    """Returns the figures by load and side; rounds that lack the first side are left out."""
    found: dict[str, dict[str, Figures]] = {}
    means = {(run.load, run.side, run.round): statistics.mean(one["ms"] for one in run.requests) for run in runs}
    first = runs[0].side if runs else ""
    for run in sorted(runs, key=lambda run: run.round):
        base = means.get((run.load, first, run.round))
        if base is None:
            continue
        figures = found.setdefault(run.load, {}).setdefault(run.side, Figures([], [], [], [], []))
        times = sorted(one["ms"] for one in run.requests)
        figures.median.append(statistics.median(times))
        figures.mean.append(statistics.mean(times))
        figures.p90.append(times[min(len(times) - 1, int(0.9 * len(times)))])
        figures.cached.append(statistics.mean(one["cached"] for one in run.requests))
        figures.ratio.append(figures.mean[-1] / base)
    return found


def print_table(found: dict[str, dict[str, Figures]]) -> None:
    table = Table(title="time to the first token: median of the rounds (least to most)")
    for column in (
        "load",
        "side",
        "rounds",
        "median, ms",
        "mean, ms",
        "p90, ms",
        "cached",
        "mean, of the first side's",
    ):
        table.add_column(column, justify="left" if column in ("load", "side") else "right")
    for load, sides in found.items():
        for side, figures in sides.items():
            times = [f"{statistics.median(one):.0f}" for one in (figures.median, figures.mean, figures.p90)]
            cached, ratio = statistics.median(figures.cached), statistics.median(figures.ratio)
            spread = f"{ratio:.2f} ({min(figures.ratio):.2f} to {max(figures.ratio):.2f})"
            table.add_row(load, side, str(len(figures.ratio)), *times, f"{cached:.0%}", spread)
        table.add_section()
    report_console(least_width=120).print(table)


def draw(found: dict[str, dict[str, Figures]], path: Path) -> None:
    """Draws the ratios to the first side: a bar for the median, a dot for each round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 3.6), dpi=130, layout="constrained")
    places = figure.subplots(1, len(found), sharex=True, squeeze=False)[0]
    for axes, (load, sides) in zip(places, found.items(), strict=True):
        names = list(sides)[::-1]
        medians = [statistics.median(sides[name].ratio) for name in names]
        axes.barh(names, medians, color="#56B4E9")
        for number, name in enumerate(names):
            axes.plot(sides[name].ratio, [number] * len(sides[name].ratio), "k.", markersize=4)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{load} load", loc="left", fontsize=10)
        axes.set_xlabel(f"mean time to the first token, of {names[-1]}'s")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--trace", type=Path, help="in Mooncake's format (default: a small one of agents)")
    parser.add_argument("--trace-block-tokens", type=positive, default=32)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--at-once", type=positive, default=4, help="requests in the engine at high load")
    parser.add_argument("--most-answer", type=positive, default=4, help="tokens of an answer, at most")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto", help="of vLLM; dummy: random weights")
    parser.add_argument("--step-tokens", type=positive, default=512, help="most tokens of a step")
    parser.add_argument("--cache-bytes", type=positive, default=2 << 30, help="memory that holds --device-tokens")
    parser.add_argument("--block-size", type=positive, default=32)
    parser.add_argument("--device-tokens", type=positive, default=4096, help="tokens of the device's KV cache")
    parser.add_argument("--store-bytes", type=positive, default=2 << 30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every run in this file, and resume from it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios (PNG, SVG or PDF)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


SMALL = AgentTraffic(
    sessions=4,
    shared_tokens=256,
    first_tokens=640,
    most_tokens=1536,
    tool_tokens=128,
    answer_tokens=16,
    gap_ms=4000,
    session_gap_ms=1000,
    block_tokens=32,
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.side is not None:
        found = measure_side(args)
        args.json.write_text(json.dumps(found))
        return 0
    if "LMCache" in args.sides and find_spec("lmcache") is None:
        print("LMCache: left out, because the package lmcache is not installed (docs/guides/kv-transfer.md)")
        args.sides = [side for side in args.sides if side != "LMCache"]
    with tempfile.TemporaryDirectory() as folder:
        if args.trace is None:
            args.trace, args.trace_block_tokens = Path(folder) / "agents.jsonl", SMALL.block_tokens
            args.trace.write_text("".join(f"{json.dumps(line)}\n" for line in SMALL.lines()))
        measured = measure(args)
    print(describe_machine())
    found = figures_of(measured)
    print_table(found)
    if args.plot:
        draw(found, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
