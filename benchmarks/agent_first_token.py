"""Time to the first token on a trace of agents: no store, our stores, partial hits, memory mode, vLLM's offloading.

`python -m benchmarks.agent_first_token --model FOLDER [--trace FILE] [--sides ...] [--loads low high] [--rounds 3]`.
The trace is in Mooncake's format; `gaudi-ucm store agent-trace` writes such. Each block id becomes random tokens of
its own. Each side is an engine in a process of its own, whose prefix cache holds `--device-tokens`; sides take turns.
At low load requests come one by one, at high load `--at-once` of them are always in the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.store.agent_trace import AgentTraffic
from vllm_gaudi_ucm_tools.store.traffic_log import TrafficLog, read_traffic

SIDES = ("none", "memory", "file", "partial hits", "memory mode", "vLLM's offloading")
LOADS = ("low", "high")
MEMORY_MODE = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 512}},
    "memory_mode": {"enabled": True},
}


def engine_options(side: str, folder: str, store_bytes: int) -> dict[str, Any]:
    """Returns what an engine of a side is started with, in addition to what all have."""
    stores = {
        "memory": {"kind": "memory", "capacity": store_bytes},
        "file": {"kind": "file", "path": f"{folder}/store", "capacity": store_bytes, "deadline": 10.0, "fsync": False},
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
    if side == "vLLM's offloading":
        return {"kv_offloading_size": store_bytes / 2**30, "kv_offloading_backend": "native"}
    return {}


def prompts_of(log: TrafficLog, vocabulary: int, round_: int) -> Iterator[list[int]]:
    """Yields the tokens of each prompt: each block id has random ones, others in each round."""
    for request in log.requests:
        blocks = [
            np.random.default_rng([round_, int(number)]).integers(3, vocabulary, log.unit_tokens)
            for number in request.prompt
        ]
        yield np.concatenate(blocks)[: request.prompt_tokens].tolist()


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
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=-(-longest // args.block_size) * args.block_size,
            max_num_seqs=max(2, args.at_once),
            max_num_batched_tokens=512,
            block_size=args.block_size,
            num_gpu_blocks_override=args.device_tokens // args.block_size,
            kv_cache_memory_bytes=2 << 30,
            disable_log_stats=True,
            **engine_options(args.side, folder, args.store_bytes),
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


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Starts a process for each side and round; returns the requests by load and side."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        load: {side: [] for side in args.sides} for load in args.loads
    }
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for side in args.sides:
                output = Path(folder) / "side.json"
                command = [sys.executable, "-m", "benchmarks.agent_first_token", "--side", side, "--round", str(round_)]
                for name in ("model", "trace", "trace_block_tokens", "block_size", "device_tokens", "store_bytes"):
                    command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
                command += ["--at-once", str(args.at_once), "--most-answer", str(args.most_answer)]
                command += ["--loads", *args.loads, "--json", str(output)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"side {side}: exit code {done.returncode}:\n{done.stderr[-4000:]}")
                for load, requests in json.loads(output.read_text()).items():
                    found[load][side] += requests
    return found


def print_table(found: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    table = Table(title="time to the first token, all requests of all rounds")
    for column in ("load", "side", "median, ms", "mean, ms", "p90, ms", "cached", "of the first side's mean"):
        table.add_column(column, justify="left" if column in ("load", "side") else "right")
    for load, sides in found.items():
        first = None
        for side, requests in sides.items():
            times = sorted(request["ms"] for request in requests)
            mean = statistics.mean(times)
            first = first or mean
            cached = statistics.mean(request["cached"] for request in requests)
            p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
            figures = f"{statistics.median(times):.0f}", f"{mean:.0f}", f"{p90:.0f}", f"{cached:.0%}"
            table.add_row(load, side, *figures, f"{mean / first:.2f}")
        table.add_section()
    report_console(least_width=110).print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--trace", type=Path, help="in Mooncake's format (default: a small one of agents)")
    parser.add_argument("--trace-block-tokens", type=positive, default=32)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--at-once", type=positive, default=4, help="requests in the engine at high load")
    parser.add_argument("--most-answer", type=positive, default=4, help="tokens of an answer, at most")
    parser.add_argument("--block-size", type=positive, default=32)
    parser.add_argument("--device-tokens", type=positive, default=4096, help="tokens of the device's KV cache")
    parser.add_argument("--store-bytes", type=positive, default=2 << 30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
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
    with tempfile.TemporaryDirectory() as folder:
        if args.trace is None:
            args.trace, args.trace_block_tokens = Path(folder) / "agents.jsonl", SMALL.block_tokens
            args.trace.write_text("".join(f"{json.dumps(line)}\n" for line in SMALL.lines()))
        measured = measure(args)
    print(describe_machine())
    print_table(measured)
    if args.json:
        args.json.write_text(json.dumps(measured) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
