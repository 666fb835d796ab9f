"""Decode speed of the whole engine with a sparse method against its own dense one: ratios, interleaved, in one run.

All engines live in one process and answer the same prompts in turn. A prompt is computed once by each and then comes
from its prefix cache, so that what is timed is decoding; the first round does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams

from benchmarks.machine import describe_machine

CONTENDERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "GSA 30 %": {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_ratio": 0.3}}},
    "GSA 10 %": {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_ratio": 0.1}}},
    "KVStar 10 %": {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": {"sparse_ratio": 0.1}}},
}
# a common 8B model with few layers: the ratio of attention to the rest is that of the whole model
LLAMA_8B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
BLOCK_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; without it a random one of 4 layers of 8B size")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--context", type=int, default=7680)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--max-graphs", type=int, default=24)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, options.model or random_model(Path(folder), options))
    print(
        f"{describe_machine()}; {options.requests} requests at {options.context} tokens, {options.new_tokens} new each"
    )
    print(f"{'':<14}{'tokens/s':>10}{'against dense':>15}{'tokens as dense':>17}")
    for name, row in found.items():
        ratio = row["tokens_per_second"] / found["dense"]["tokens_per_second"]
        print(f"{name:<14}{row['tokens_per_second']:>10.1f}{ratio:>14.2f}x{row['agreement']:>16.0%}")
    if options.json:
        rows = {
            name: {key: row[key] for key in ("tokens_per_second", "seconds", "agreement")}
            for name, row in found.items()
        }
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


def random_model(folder: Path, options: argparse.Namespace) -> Path:
    from transformers import LlamaConfig

    longest = options.context + options.new_tokens + BLOCK_SIZE
    LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=longest, **LLAMA_8B).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace, model: Path) -> dict[str, dict[str, Any]]:
    """By contender: median tokens per second of the rounds after the first, and the share of dense's tokens."""
    engines = {name: start(CONTENDERS[name], options, model) for name in options.contenders}
    vocabulary = next(iter(engines.values())).model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (options.requests, options.context), generator=generator).tolist()
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in engines}
    for repeat in range(1 + options.repeats):
        for name, engine in engines.items():
            seconds, tokens = run(engine, requests, options.new_tokens)
            found[name]["tokens"] = tokens
            if repeat:
                found[name]["seconds"].append(seconds)
    for row in found.values():
        row["tokens_per_second"] = options.requests * options.new_tokens / statistics.median(row["seconds"])
        row["agreement"] = agreement(row["tokens"], found["dense"]["tokens"])
    return found


def start(ucm: dict[str, Any], options: argparse.Namespace, model: Path) -> LLM:
    random = {} if options.model else {"load_format": "dummy"}
    longest = options.context + options.new_tokens + BLOCK_SIZE
    return LLM(
        str(model),
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=options.requests,
        max_num_batched_tokens=1024,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=options.requests * (-(-longest // BLOCK_SIZE) + 1) + 1,
        kv_cache_memory_bytes=8 << 30,
        additional_config={"ucm": {**ucm, "graphs": {"warm_up": "full", "max_graphs": options.max_graphs}}},
        **random,
    )


def run(engine: LLM, requests: list[Any], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first step to the last, and the tokens of each request."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = engine.generate(requests, params, use_tqdm=False)
    return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of tokens that are equal place by place."""
    pairs = [
        one == other for row, dense in zip(found, expected, strict=True) for one, other in zip(row, dense, strict=True)
    ]
    return sum(pairs) / len(pairs)


if __name__ == "__main__":
    main()
