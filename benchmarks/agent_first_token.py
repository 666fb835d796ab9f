"""Time to the first token on a trace of agents: without a store, with our stores, and with others.

    python -m benchmarks.agent_first_token --trace agents.jsonl --rounds 5
    python -m benchmarks.agent_first_token --device cuda --layers 8 --json runs.json

Sides are our stores, partial hits, memory mode, vLLM's offloading, and LMCache if its package is installed. The trace
is in Mooncake's format; `gaudi-ucm store agent-trace` writes such. Each block id becomes random tokens of its own. The
model has random weights (`--shape`), or a folder's (`--model`). Each side is an engine in a process of its own,
whose prefix cache holds `--device-tokens`. `--together` sides start at the same time; then they take turns, and a side
is stopped while another one works. Each round begins with another side. Figures are medians of the rounds, with the
least and the most. At low load requests come one by one, at high load `--at-once` of them are always in the engine. A
side that fails, or takes longer than `--limit`, is named and left out. `--json` keeps every run; the same command then
goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.agent_figures import Run, draw, figures_of, print_table
from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.tensor_parallel import DEVICE_KIND, SHAPES, config_of
from vllm_gaudi_ucm_tools.store.agent_trace import AgentTraffic
from vllm_gaudi_ucm_tools.store.traffic_log import read_traffic

SIDES = ("none", "memory", "file", "tiered", "partial hits", "memory mode", "vLLM's offloading", "LMCache")
LOADS = ("low", "high")
ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("agent_first_token_side.py")
MODEL = Path(".cache/models/smollm2-135m-instruct")
MEMORY_MODE = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 512}},
    "memory_mode": {"enabled": True},
}
WARM_SEED = 1_000_000
DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {"block_size": 32, "step_tokens": 512, "device_tokens": 4096, "store_bytes": 2 << 30},
    "cuda": {"block_size": 128, "step_tokens": 8192, "device_tokens": 104 << 10, "store_bytes": 12 << 30},
}
"""Values of options by device, unless they are given."""
# a GPU fills 64 blocks, as many as wait by default, in one step
SAVES: dict[str, dict[str, int]] = {"cpu": {}, "cuda": {"save_queue": 512, "save_workers": 8}}
TRAFFIC = {
    "cpu": AgentTraffic(
        sessions=4,
        shared_tokens=256,
        first_tokens=640,
        most_tokens=1536,
        tool_tokens=128,
        answer_tokens=16,
        gap_ms=4000,
        session_gap_ms=1000,
        block_tokens=32,
    ),
    # 32 prompts of 20K to 97K tokens, 86 % of their tokens seen before, 51 % not longer than 104K tokens ago
    "cuda": AgentTraffic(
        sessions=3,
        shared_tokens=4000,
        tool_tokens=9000,
        answer_tokens=100,
        branch_percent=0,
        session_gap_ms=1000,
        block_tokens=128,
        seed=5,
    ),
}
"""The trace by device, unless one is given."""


def side_options(side: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what an engine of a side is started with, in addition to what all have."""
    store_bytes = args.store_bytes
    file = {"kind": "file", "path": f"{folder}/{side}", "capacity": store_bytes, "deadline": 10.0, "fsync": False}
    stores: dict[str, dict[str, Any]] = {
        "memory": {"kind": "memory", "capacity": store_bytes},
        "file": file,
        # a quarter of the blocks in memory
        "tiered": {"kind": "tiered", "front": {"capacity": store_bytes // 4}, "behind": file},
    }
    if side in stores:
        transfer = {
            "kv_connector": "UcmConnector",
            "kv_connector_module_path": "vllm_gaudi_ucm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": stores[side], **SAVES[args.device]},
        }
        return {"kv_transfer_config": transfer}
    if side == "partial hits":
        return {"additional_config": {"ucm": {"kv_cache": {"partial_hits": True}}}}
    if side == "memory mode":
        return {"additional_config": {"ucm": MEMORY_MODE}}
    if side == "LMCache":
        # its own chunks, of 256 tokens, would find less of a short prompt than blocks do
        options = {"lmcache.chunk_size": args.block_size, "lmcache.max_local_cpu_size": store_bytes / 2**30}
        transfer = {
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        return {"kv_transfer_config": transfer}
    if side == "vLLM's offloading":
        return {"kv_offloading_size": store_bytes / 2**30, "kv_offloading_backend": "native"}
    return {}


def engine_options(side: str, model: Path, folder: str, longest: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of an engine. longest: tokens of a prompt and its answer."""
    shape = json.loads((model / "config.json").read_text())
    dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * dim * (2 if is_short(args) else 4)
    blocks = args.device_tokens // args.block_size
    options = {
        "model": str(model.resolve()),
        "dtype": args.dtype,
        "load_format": "auto" if args.model else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": -(-longest // args.block_size) * args.block_size,
        "max_num_seqs": max(2, args.at_once),
        "max_num_batched_tokens": args.step_tokens,
        "block_size": args.block_size,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": blocks * args.block_size * per_token,
        "disable_log_stats": True,
        **side_options(side, folder, args),
    }
    if args.device == "cuda":
        ucm = options.get("additional_config", {}).get("ucm", {})
        graphs = {"mode": "capture", "warm_up": "full", "max_graphs": args.max_graphs}
        options["additional_config"] = {"ucm": ucm | {"graphs": graphs}}
    return options


def is_short(args: argparse.Namespace) -> bool:
    """Returns whether a number takes two bytes."""
    return args.dtype in ("bfloat16", "float16")


def measure(args: argparse.Namespace) -> tuple[list[Run], dict[str, str]]:
    """Measures what `--json` does not have yet. Returns the runs of all, and why sides were left out, by side."""
    runs, failed = read_runs(args.json), dict[str, str]()
    log = read_traffic(args.trace, args.trace_block_tokens)
    longest = max(request.prompt_tokens for request in log.requests) + args.most_answer
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(Path(folder), longest, args)
        for first in range(0, len(args.sides), args.together):
            group = [side for side in args.sides[first : first + args.together] if missing(side, runs, args)]
            engines = {
                side: engine_of(side, engine_options(side, model, folder, longest, args), args) for side in group
            }
            try:
                failed |= start(engines, args)
                take_turns(engines, runs, failed, args)
            finally:
                for engine in engines.values():
                    engine.stop()
    return runs, failed


def write_model(folder: Path, longest: int, args: argparse.Namespace) -> Path:
    """Writes the configuration of a model of random weights."""
    config = config_of(args.shape) | {"max_position_embeddings": longest + args.block_size}
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_of(side: str, options: dict[str, Any], args: argparse.Namespace) -> EngineSide:
    """Returns an engine that has not started yet."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        DEVICE_KIND: args.device,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    name = "".join(letter if letter.isalnum() else "-" for letter in side)
    return EngineSide(name, Path(sys.executable), options, environment, WORKER, timeout_s=args.limit)


def start(engines: dict[str, EngineSide], args: argparse.Namespace) -> dict[str, str]:
    """Starts engines at the same time. Returns the reasons of those that fail, by side."""
    failed = {}
    with ThreadPoolExecutor(len(engines) or 1) as pool:
        begun = {side: pool.submit(start_one, engine, args) for side, engine in engines.items()}
        for side, future in begun.items():
            try:
                report(f"{side}: started in {future.result():.0f} s")
            except SideFailed as error:
                failed[side] = leave_out(side, engines[side], error)
    return failed


def start_one(engine: EngineSide, args: argparse.Namespace) -> float:
    """Starts an engine and lets it meet the shapes of steps. Returns seconds until its first token."""
    seconds, _ = engine.start()
    # the second time a prompt comes from the store
    for _ in range(2):
        engine.ask(order(WARM_SEED, 1, args, most_requests=1))
    return seconds


def leave_out(side: str, engine: EngineSide, error: SideFailed) -> str:
    """Ends an engine that failed, so that it does not disturb others. Returns the reason."""
    engine.stop()
    report(f"{side}: left out. {error}")
    return str(error)


def take_turns(
    engines: dict[str, EngineSide], runs: list[Run], failed: dict[str, str], args: argparse.Namespace
) -> None:
    """Lets each engine replay the trace once for each round and load, and appends the runs."""
    done = {(run.round, run.load, run.side) for run in runs}
    for number, load in enumerate(args.loads):
        for round_ in range(args.rounds):
            names = list(engines)
            first = round_ % max(1, len(names))
            for side in [*names[first:], *names[:first]]:
                if side in failed or (round_, load, side) in done:
                    continue
                at_once = args.at_once if load == "high" else 1
                try:
                    answer = engines[side].ask(order(10 * round_ + number, at_once, args))
                except SideFailed as error:
                    failed[side] = leave_out(side, engines[side], error)
                    continue
                runs.append(Run(round_, side, load, answer["requests"]))
                seconds = sum(one["ms"] for one in answer["requests"]) / 1e3
                report(
                    f"{side}, {load} load, round {round_}: {seconds:.1f} s to {len(answer['requests'])} first tokens"
                )
                if args.json:
                    args.json.write_text(json.dumps([run._asdict() for run in runs]) + "\n")


def order(seed: int, at_once: int, args: argparse.Namespace, most_requests: int | None = None) -> dict[str, Any]:
    """Returns an order to replay the trace, or its first requests, with tokens of a seed."""
    return {
        "trace": str(args.trace.resolve()),
        "block_tokens": args.trace_block_tokens,
        "at_once": at_once,
        "most_answer": args.most_answer,
        "seed": seed,
        "most_requests": most_requests,
    }


def missing(side: str, runs: Sequence[Run], args: argparse.Namespace) -> bool:
    """Returns whether a side lacks a run."""
    done = {(run.round, run.load) for run in runs if run.side == side}
    return any((round_, load) not in done for round_ in range(args.rounds) for load in args.loads)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_runs(path: Path | None) -> list[Run]:
    return [Run(**run) for run in json.loads(path.read_text())] if path is not None and path.exists() else []


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(DEFAULTS), default="cpu")
    parser.add_argument("--model", type=Path, help="folder of a model (on a CPU SmolLM2, unless there is --shape)")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape (on a GPU 8b)")
    parser.add_argument("--layers", type=positive, help="layers of random weights, in place of the shape's")
    parser.add_argument("--trace", type=Path, help="in Mooncake's format (default: one of agents, by the device)")
    parser.add_argument("--trace-block-tokens", type=positive, default=32)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--together", type=positive, default=len(SIDES), help="sides that take turns (all)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a side's start and of each replay (600)")
    parser.add_argument("--at-once", type=positive, default=4, help="requests in the engine at high load")
    parser.add_argument("--most-answer", type=positive, default=4, help="tokens of an answer, at most")
    parser.add_argument("--dtype", help="(float32 on a CPU, bfloat16 on a GPU)")
    parser.add_argument("--step-tokens", type=positive, help="most tokens of a step")
    parser.add_argument("--block-size", type=positive)
    parser.add_argument("--device-tokens", type=positive, help="tokens of the device's KV cache")
    parser.add_argument("--store-bytes", type=positive)
    parser.add_argument("--max-graphs", type=positive, default=24, help="graphs of a GPU (24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every run in this file, and resume from it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios (PNG, SVG or PDF)")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.model is not None and (args.shape or args.layers):
        parser.error("--model has weights; --shape and --layers are of random ones")
    if args.model is None and args.shape is None and args.layers is None and args.device == "cpu":
        args.model = MODEL
    args.shape = args.shape or "8b"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 if a side failed."""
    args = parse(argv)
    if "LMCache" in args.sides and find_spec("lmcache") is None:
        report("LMCache: left out, because the package lmcache is not installed (docs/guides/kv-transfer.md)")
        args.sides = [side for side in args.sides if side != "LMCache"]
    with tempfile.TemporaryDirectory() as folder:
        if args.trace is None:
            traffic = TRAFFIC[args.device]
            args.trace, args.trace_block_tokens = Path(folder) / "agents.jsonl", traffic.block_tokens
            args.trace.write_text("".join(f"{json.dumps(line)}\n" for line in traffic.lines()))
        runs, failed = measure(args)
    print(describe_machine())
    found = figures_of(runs)
    print_table(found)
    for side, reason in failed.items():
        print(f"{side}: left out. {reason}")
    if args.plot:
        draw(found, args.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
