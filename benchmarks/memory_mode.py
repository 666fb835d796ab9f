"""Memory mode against its method alone: requests that fit in a given KV memory, speed, and its effect on answers.

Each contender has an engine of its own, in turn, in this process. Requests: more prompts than fit wait at once, and
prefix caching is off, so that every block that comes back is loaded. Answers: see memory_mode_quality.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

from benchmarks.machine import describe_machine
from benchmarks.memory_mode_quality import equal_share, follow, look_ups
from benchmarks.positive import positive
from benchmarks.retrieval.model import MODEL as RETRIEVAL_MODEL
from benchmarks.sparse_text import find_text, read_text
from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import ForcedTokens

MODEL = Path(".cache/models/smollm2-135m-instruct")
DENSE = "dense"
COLUMNS = {
    "running": "requests at once",
    "tokens_per_second": "tokens/s",
    "step_ms": "decode ms",
    "nats": "nats/token",
    "as_dense": "as dense",
    "look_ups": "look-ups",
    "missed": "missed",
}


def main() -> None:
    options = parser().parse_args()
    prompts, answers = texts(options)
    asked = look_ups(options.context, 16, options.sequences, seed=1)
    rows: dict[str, dict[str, float]] = {}
    likeliest: list[list[int]] = []
    for name, ucm in contenders(options).items():
        begin = time.perf_counter()
        row = rows[name] = capacity(ucm, options, prompts)
        with engine(options.model, ucm, options) as llm:
            found = follow(llm, prompts[: options.texts], answers[: options.texts])
            row["missed"] = missed(llm)
        likeliest = likeliest or found["likeliest"]
        row["nats"], row["as_dense"] = found["nats"], equal_share(found["likeliest"], likeliest)
        with engine(RETRIEVAL_MODEL, ucm, options) as llm:
            row["look_ups"] = equal_share(follow(llm, *asked)["likeliest"], asked[1])
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    report(
        f"KV cache of {options.blocks} blocks of {options.block_size} tokens; {options.requests} requests of "
        f"{options.context} tokens and {options.new_tokens} new ones",
        COLUMNS,
        rows,
        options.json,
    )


def report(title: str, columns: dict[str, str], rows: dict[str, dict[str, float]], file: Path | None) -> None:
    """Prints a table of figures by contender, columns with their headings, and writes it to a file if there is one."""
    print(f"{describe_machine()}; {title}")
    print(f"{'':<18}" + "".join(f"{heading:>18}" for heading in columns.values()))
    for name, row in rows.items():
        print(f"{name:<18}" + "".join(f"{row[column]:>18.3f}" for column in columns))
    if file:
        file.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


def contenders(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options of the plugin by name: dense, the method alone, and with each part of a context on the device."""
    method = {"sparse_ratio": options.sparse_ratio, "sparse_steps": "always", "min_tokens": 256}
    alone = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": method}}
    found = {DENSE: {}, f"GSA {options.sparse_ratio:.0%}": alone}
    for ratio in options.on_device_ratios:
        found[f"  on device {ratio:.0%}"] = {**alone, "memory_mode": {"enabled": True, "on_device_ratio": ratio}}
    return found


def texts(options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts of a real text, and their continuations."""
    from transformers import AutoTokenizer

    width = options.context + options.new_tokens
    count = max(options.requests, options.texts)
    tokens = AutoTokenizer.from_pretrained(options.model)(read_text(find_text())[: 8 * width * count])["input_ids"]
    # windows overlap if the text is short
    stride = min(width, (len(tokens) - width) // max(1, count - 1))
    windows = [tokens[index * stride : index * stride + width] for index in range(count)]
    return [window[: options.context] for window in windows], [window[options.context :] for window in windows]


@contextmanager
def engine(model: Path, ucm: dict[str, Any], options: argparse.Namespace, **more: Any) -> Iterator[LLM]:
    llm = LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=options.context + options.new_tokens + options.block_size,
        max_num_seqs=options.requests,
        max_num_batched_tokens=1024,
        block_size=options.block_size,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 << 30,
        logits_processors=[ForcedTokens],
        additional_config={"ucm": ucm},
        **more,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def capacity(ucm: dict[str, Any], options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """All prompts at once in a small cache: requests that run on average while others wait, tokens per second, and the
    median time of a step of decodes alone."""
    params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True, detokenize=False)
    with engine(options.model, ucm, options, num_gpu_blocks_override=options.blocks) as llm:
        for index, prompt in enumerate(prompts[: options.requests]):
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        running, decodes = [], []
        begin = time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            only_decodes = all(not request.is_prefill_chunk for request in scheduler.running) and not scheduler.waiting
            llm.llm_engine.step()
            if scheduler.waiting:
                running.append(len(scheduler.running))
            if only_decodes and scheduler.running:
                decodes.append((time.perf_counter() - start) * 1000 / len(scheduler.running))
        seconds = time.perf_counter() - begin
    return {
        "running": statistics.mean(running) if running else float(options.requests),
        "tokens_per_second": options.requests * options.new_tokens / seconds,
        "step_ms": statistics.median(decodes) if decodes else float("nan"),
    }


def missed(llm: LLM) -> float:
    """Mean share of attention that was estimated to fall on blocks that were away; 0 without memory mode."""
    offload = getattr(llm.llm_engine.engine_core.engine_core.scheduler, "offload", None)
    return offload.totals.missed / max(1, offload.totals.scored) if offload is not None else 0.0


def parser() -> argparse.ArgumentParser:
    """Options of the benchmarks of memory mode."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--model", type=Path, default=MODEL)
    found.add_argument("--blocks", type=positive, default=160, help="blocks of the KV cache in which requests must fit")
    found.add_argument("--block-size", type=positive, default=32)
    found.add_argument("--requests", type=positive, default=10)
    found.add_argument("--context", type=positive, default=1536)
    found.add_argument("--new-tokens", type=positive, default=96)
    found.add_argument("--texts", type=positive, default=4, help="prompts whose real continuation is followed")
    found.add_argument("--sequences", type=positive, default=12, help="prompts of 16 look-ups each")
    found.add_argument("--sparse-ratio", type=float, default=0.3)
    found.add_argument("--on-device-ratios", type=float, nargs="+", default=[0.5, 0.35])
    found.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return found


if __name__ == "__main__":
    main()
