"""One process of benchmarks.static_shapes: makes the model, or runs one engine over the load and prints its figures."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        "requests": 12,
        "longest": 200,
        "prefix": 64,
        "new_tokens": 16,
        "limits": {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 16},
        "kv_bytes": 8 << 20,
    },
    "small": {
        "config": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
        "requests": 64,
        "longest": 1200,
        "prefix": 512,
        "new_tokens": 64,
        "limits": {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 1024, "block_size": 128},
        "kv_bytes": 2 << 30,
    },
}
VOCABULARY = 4096


def make(size: str, folder: str) -> dict[str, Any]:
    """A random Llama whose logits are far apart, so that greedy tokens do not hang on rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=SIZES[size]["limits"]["max_model_len"],
        initializer_range=0.2,
        **SIZES[size]["config"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return {}


def prompts(size: str) -> list[list[int]]:
    """Lengths drawn evenly on a logarithmic scale; every third prompt begins with a common prefix."""
    shape = SIZES[size]
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prefix = tokens(shape["prefix"])
    longest = shape["longest"] - shape["prefix"]
    lengths = [int(longest ** float(torch.rand(1, generator=generator))) for _ in range(shape["requests"])]
    return [(prefix if index % 3 == 0 else []) + tokens(length) for index, length in enumerate(lengths)]


def run(way: str, size: str, folder: str, dtype: str, max_graphs: int, skeleton: int, repeats: int) -> dict[str, Any]:
    """Median tokens/s (in and out) over the repeats after one run that does not count."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from vllm_gaudi_ucm.observability.phase_log import read_phase_log

    torch.backends.cuda.matmul.allow_tf32 = False
    shape = SIZES[size]
    log = Path(folder) / f"{way}.jsonl"
    mode, warm_up = ("capture", "idle") if way == "idle" else (way, "full")
    graphs = {"mode": mode, "warm_up": warm_up, "max_graphs": max_graphs, "skeleton": skeleton}
    llm = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=shape["kv_bytes"],
        additional_config={"ucm": {"phase_log": str(log), "graphs": graphs}},
        **shape["limits"],
    )
    params = SamplingParams(temperature=0, max_tokens=shape["new_tokens"], ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts(size)]
    core: Any = llm.llm_engine.engine_core
    static = core.engine_core.model_executor.driver_worker.worker.model_runner.static
    seconds, tokens = [], []
    for repeat in range(1 + repeats):
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        if repeat and tokens != [list(output.outputs[0].token_ids) for output in outputs]:
            raise RuntimeError(f"{way}: run {repeat} gave other tokens than the one before")
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if way == "idle" and not repeat:
            # the first run was served by the skeleton, the runs after the gap by everything
            wait_until_warm(static)
    summary = static.summary() if static is not None else None
    core.shutdown()
    steps = read_phase_log(log)[1]
    work = sum(len(request["prompt_token_ids"]) for request in requests) + shape["new_tokens"] * len(requests)
    return {
        "way": way,
        "device": f"{current_platform.get_device_name()}, torch {torch.__version__}, {dtype}",
        "tokens_per_second": work / statistics.median(seconds[1:]),
        "seconds": seconds,
        "tokens": tokens,
        "padding": sum(s.padded.query_len for s in steps) / sum(s.bucket.query_len for s in steps),
        "steps": len(steps),
        "graphs": 0 if summary is None else len([r for r in summary.records if r.state == "warm"]),
        "graph_bytes": 0 if summary is None else summary.size,
        "skeleton_seconds": 0.0 if summary is None else summary.skeleton_seconds,
        "warm_up_seconds": 0.0 if summary is None else summary.seconds,
        "records": [] if summary is None else [[str(r.key), r.state, r.seconds, r.size] for r in summary.records],
    }


def wait_until_warm(static: Any) -> None:
    """Returns when no graph is cold any more; raises if that does not happen."""
    deadline = time.monotonic() + 300
    while static.execution.ready.cold:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(static.execution.ready.cold)} graphs are still cold after 300 s without requests")
        time.sleep(0.05)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "make":
        found = make(*arguments)
    else:
        way, size, folder, dtype, *counts = arguments
        found = run(way, size, folder, dtype, *map(int, counts))
    print(json.dumps(found))
