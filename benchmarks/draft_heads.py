"""Tokens per second with drafts of a known acceptance: no drafts, drafts without passes (as of n-grams), a draft head.

    python -m benchmarks.draft_heads --acceptance 0.6
    python -m benchmarks.draft_heads --device cuda --shape 8b --json heads.json

The model has random layers, but its next token is known (`known_drafts.py`). A head of EAGLE computes its passes as
always; which of its drafts are wrong is decided by noise. All tokens are checked. Each engine has its own process.

The last column is the ratio if memory alone bounds steps: each forward reads all weights once, in the same time
per byte, and the host takes none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tensor_parallel import DEVICE_KIND, SHAPES, config_of

KINDS = ("none", "n-grams", "head")


class Found(NamedTuple):
    """rate: tokens per second. per_step: tokens of each request and step. step_ms: time of a step."""

    rate: float
    per_step: float
    step_ms: float


def main() -> None:
    """Measures the rows of a table, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=float, default=0.6, help="probability that a draft is right (0.6)")
    parser.add_argument("--drafts", type=int, default=3, help="drafts of a verification (3)")
    parser.add_argument("--requests", type=int, default=1, help="requests at once (1)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer (96)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, of which the median counts (3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small", help="of the model (small)")
    parser.add_argument("--layers", type=int, help="layers of the model instead of the shape's; the head has one")
    parser.add_argument("--max-graphs", type=int, default=24, help="graphs of a GPU (24)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    asked = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", DEVICE_KIND: asked.device}
    config = config_of(asked.shape) | {"tie_word_embeddings": False}
    config["num_hidden_layers"] = asked.layers or config["num_hidden_layers"]
    rows: dict[str, Found] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes,
    ):
        print(
            f"{'drafts':<10}{'tokens/s':>10}{'ratio':>8}{'tokens a step':>15}{'step, ms':>10}{'bound':>8}", flush=True
        )
        for kind in KINDS:
            found = rows[kind] = processes.submit(_measure, Path(folder), kind, asked, config).result()
            bound = found.per_step / (1 + (_cost_of_drafts(config, asked.drafts) if kind == "head" else 0))
            print(
                f"{kind:<10}{found.rate:>10.1f}{found.rate / rows['none'].rate:>8.2f}{found.per_step:>15.2f}"
                f"{found.step_ms:>10.2f}{bound:>8.2f}",
                flush=True,
            )
    if asked.json:
        facts = {name: value for name, value in vars(asked).items() if name != "json"}
        asked.json.write_text(json.dumps({"asked": facts, "found": {k: v._asdict() for k, v in rows.items()}}))


def _cost_of_drafts(config: dict[str, Any], drafts: int) -> float:
    """Returns the bytes that the passes of a head read, compared with a step of the model."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * heads * config["head_dim"] + 3 * hidden * config["intermediate_size"]
    output = hidden * config["vocab_size"]
    head = layer + 2 * hidden**2 + output
    return drafts * head / (config["num_hidden_layers"] * layer + output)


def _measure(folder: Path, kind: str, asked: argparse.Namespace, config: dict[str, Any]) -> Found:
    """Measures one engine."""
    from vllm import LLM, SamplingParams

    from benchmarks.known_drafts import LOAD_FORMAT, first_wrong, propose_known_drafts

    on_gpu, vocabulary = asked.device == "cuda", config["vocab_size"]
    graphs = {"mode": "capture", "warm_up": "full", "max_graphs": asked.max_graphs} if on_gpu else {}
    llm = LLM(
        model=_write(folder / "model", config),
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16" if on_gpu else "float32",
        max_model_len=1024,
        max_num_seqs=max(2, asked.requests),
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        speculative_config=_speculation(folder, kind, asked, config),
        additional_config={"ucm": {"graphs": graphs}} if on_gpu else {},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    if kind != "none":
        source = "model" if kind == "head" else "host"
        propose_known_drafts(runner.parts, vocabulary, asked.acceptance, source)
    steps, execute = [0], runner.parts.steps.execute_model

    def counted(*args: Any, **options: Any) -> Any:
        steps[0] += 1
        return execute(*args, **options)

    runner.parts.steps.execute_model = counted
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [100 * number + 3, 7, 11]} for number in range(asked.requests)]
    times = []
    for number in range(asked.rounds + 1):
        steps[0], began = 0, time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if number:
            times.append(time.perf_counter() - began)
        for prompt, output in zip(prompts, outputs, strict=True):
            wrong = first_wrong(prompt["prompt_token_ids"], list(output.outputs[0].token_ids), vocabulary)
            if wrong is not None:
                raise RuntimeError(f"found another token than the next number at {wrong} with drafts: {kind}")
    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    seconds = statistics.median(times)
    return Found(asked.requests * asked.tokens / seconds, asked.tokens / steps[0], 1e3 * seconds / steps[0])


def _speculation(folder: Path, kind: str, asked: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any] | None:
    if kind == "none":
        return None
    if kind == "n-grams":
        return {"method": "ngram", "num_speculative_tokens": asked.drafts, "prompt_lookup_max": 2}
    head = _write(folder / "head", {**config, "num_hidden_layers": 1})
    return {"method": "eagle", "model": head, "num_speculative_tokens": asked.drafts}


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    main()
