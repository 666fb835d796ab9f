"""Decode steps of a model with random weights, shared by 1, 2, 4 ... devices, compared with the limits of memory and
links.

Each size runs in a process of its own: an engine as a server starts it, with a worker for each device. The limit is
weights and KV of one device over its memory's bandwidth, and the bytes of the reductions over its link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.output import report_console, task_progress

# layers, hidden, intermediate, heads, KV heads, vocabulary; heads of 128
SHAPES: dict[str, dict[str, int]] = {
    "70b": dict(zip(("l", "h", "i", "q", "kv", "v"), (80, 8192, 28672, 64, 8, 128256), strict=True)),
    "8b": dict(zip(("l", "h", "i", "q", "kv", "v"), (32, 4096, 14336, 32, 8, 128256), strict=True)),
    "small": dict(zip(("l", "h", "i", "q", "kv", "v"), (8, 1024, 2816, 8, 4, 4096), strict=True)),
}
# Reached bytes per second: of an H200's memory as a copy measures it, and of its links in one direction.
BANDWIDTH, LINK = 4.24e12, 450e9
NEW_TOKENS = 48
DEVICE_KIND = "VLLM_GAUDI_UCM_DEVICE"


@dataclass(frozen=True)
class DecodeTime:
    """Medians of decode steps of `requests` requests, in milliseconds: of the worker, and of the engine's loop.

    limit: of a device's memory and links; None on a CPU, whose workers share both.
    """

    devices: int
    requests: int
    worker_ms: float
    engine_ms: float
    limit_ms: float | None


def config_of(shape: str) -> dict[str, Any]:
    """Returns the configuration of a Llama in the form of its config.json."""
    size = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": size["l"],
        "hidden_size": size["h"],
        "intermediate_size": size["i"],
        "num_attention_heads": size["q"],
        "num_key_value_heads": size["kv"],
        "head_dim": 128,
        "vocab_size": size["v"],
        "max_position_embeddings": 8192,
    }


def limit_ms(shape: str, devices: int, requests: int, context: int, bandwidth: float, link: float) -> float:
    """Returns the limit of a decode step on one of `devices`: every weight and every cached token is read once, in two
    bytes.
    """
    part = ModelSpec.from_hf_config(config_of(shape)).shard(devices)
    read = part.weight_bytes + requests * context * part.kv_bytes_per_token
    sent = 2 * part.layers * 2 * (devices - 1) / devices * requests * part.hidden * part.dtype_bytes
    return 1e3 * (read / bandwidth + sent / link)


def serve(options: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Serves in a process of its own; returns (requests, worker's and engine's milliseconds of a step) for each number
    of requests.
    """
    import time

    from vllm import LLM, SamplingParams

    folder, log, context = Path(options["folder"]), Path(options["folder"]) / "steps.jsonl", options["context"]
    (folder / "config.json").write_text(json.dumps(config_of(options["shape"])))
    most = max(options["requests"])
    llm = LLM(
        str(folder),
        tensor_parallel_size=options["devices"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options["dtype"],
        max_model_len=context + NEW_TOKENS + 128,
        max_num_seqs=most,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        seed=0,
        additional_config={"ucm": {"phase_log": str(log), "graphs": {"warm_up": "full", "max_graphs": 16}}},
        **({"kv_cache_memory_bytes": options["kv_bytes"]} if options["kv_bytes"] else {}),
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    engine_ms = {}
    for requests in options["requests"]:
        begins, prompts = [], [[(i * 31 + t) % 4000 + 3 for t in range(context)] for i in range(requests)]
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(f"{requests}-{index}", {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            begins.append(time.perf_counter())
            llm.llm_engine.step()
        decodes = [later - begin for begin, later in pairwise(begins)][-NEW_TOKENS // 2 :]
        engine_ms[requests] = 1e3 * statistics.median(decodes)
    llm.llm_engine.engine_core.shutdown()
    _, records = read_phase_log(log)
    worker = {
        requests: statistics.median(
            record.plan_ms + record.forward_ms + record.sample_ms
            for record in records
            if record.requests == record.tokens == requests
        )
        for requests in options["requests"]
    }
    return [(requests, worker[requests], engine_ms[requests]) for requests in options["requests"]]


def measure(options: argparse.Namespace) -> list[DecodeTime]:
    """A row for each number of devices and of requests."""
    rows = []
    with task_progress("serving") as progress:
        for index, devices in enumerate(options.devices):
            rows += _measure_size(options, devices)
            progress((index + 1) / len(options.devices))
    return rows


def _measure_size(options: argparse.Namespace, devices: int) -> list[DecodeTime]:
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "folder": folder,
            "devices": devices,
            "shape": options.shape,
            "context": options.context,
            "requests": options.requests,
            "dtype": "float32" if options.device == "cpu" else "bfloat16",
            "kv_bytes": (2 << 30) // devices if options.device == "cpu" else 0,
        }
        env = {**os.environ, DEVICE_KIND: options.device, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--serve", json.dumps(asked), str(result)]
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        found = json.loads(result.read_text())
    bound = None if options.device == "cpu" else (options.bandwidth, options.link)
    return [
        DecodeTime(
            devices,
            requests,
            worker,
            engine,
            None if bound is None else limit_ms(options.shape, devices, requests, options.context, *bound),
        )
        for requests, worker, engine in found
    ]


def show(rows: Sequence[DecodeTime]) -> None:
    """A table; `x` are ratios to the first number of devices, and to the limit."""
    table = Table("devices", "requests", "worker, ms", "engine, ms", "x of the first", "limit, ms", "x of the limit")
    first = {row.requests: row.engine_ms for row in reversed(rows)}
    for row in rows:
        limit = ("", "") if row.limit_ms is None else (f"{row.limit_ms:.2f}", f"{row.engine_ms / row.limit_ms:.2f}")
        speed = f"{first[row.requests] / row.engine_ms:.2f}"
        times = (f"{row.worker_ms:.2f}", f"{row.engine_ms:.2f}")
        table.add_row(str(row.devices), str(row.requests), *times, speed, *limit)
    report_console().print(table)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("JSON", "FILE"), help="the process of one engine")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--devices", type=_numbers, default=[1, 2], metavar="N,N", help="(default: 1,2)")
    parser.add_argument("--requests", type=_numbers, default=[1, 16], metavar="N,N", help="(default: 1,16)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second of a device's memory")
    parser.add_argument("--link", type=float, default=LINK, help="bytes per second from a device to the others")
    options = parser.parse_args(argv)
    if options.serve:
        asked, result = options.serve
        Path(result).write_text(json.dumps(serve(json.loads(asked))))
        return
    show(measure(options))


if __name__ == "__main__":
    main()
