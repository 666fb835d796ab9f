"""Tokens per second with drafts of a known acceptance: no drafts, drafts without passes (as of n-grams), a draft head.

    python -m benchmarks.draft_heads --acceptance 0.6

The model has random layers, but its next token is known (`known_drafts.py`). A head of EAGLE computes its passes as
always; which of its drafts are wrong is decided by noise. All tokens are checked.
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

VOCABULARY = 8192


def main() -> None:
    """Measures the rows of a table, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=float, default=0.6, help="probability that a draft is right (0.6)")
    parser.add_argument("--drafts", type=int, default=3, help="drafts of a verification (3)")
    parser.add_argument("--requests", type=int, default=1, help="requests at once (1)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer (96)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, of which the median counts (3)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the model (1024)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model; the head has one (8)")
    asked = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        rows = {kind: _measure(Path(folder), kind, asked) for kind in ("none", "n-grams", "head")}
    print(f"{'drafts':<10}{'tokens/s':>10}{'ratio':>8}{'tokens a step':>15}")
    for kind, (rate, per_step) in rows.items():
        print(f"{kind:<10}{rate:>10.1f}{rate / rows['none'][0]:>8.2f}{per_step:>15.2f}")


def _measure(folder: Path, kind: str, asked: argparse.Namespace) -> tuple[float, float]:
    """Returns tokens per second, and tokens of each request and step."""
    from vllm import LLM, SamplingParams

    from benchmarks.known_drafts import LOAD_FORMAT, first_wrong, propose_known_drafts

    llm = LLM(
        model=_config(folder / "model", asked.hidden, asked.layers),
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=max(2, asked.requests),
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        speculative_config=_speculation(folder, kind, asked),
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    if kind != "none":
        source = "model" if kind == "head" else "host"
        propose_known_drafts(runner.parts, VOCABULARY, asked.acceptance, source)
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
            wrong = first_wrong(prompt["prompt_token_ids"], list(output.outputs[0].token_ids), VOCABULARY)
            if wrong is not None:
                raise RuntimeError(f"found another token than the next number at {wrong} with drafts: {kind}")
    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    return asked.requests * asked.tokens / statistics.median(times), asked.tokens / steps[0]


def _speculation(folder: Path, kind: str, asked: argparse.Namespace) -> dict[str, Any] | None:
    if kind == "none":
        return None
    if kind == "n-grams":
        return {"method": "ngram", "num_speculative_tokens": asked.drafts, "prompt_lookup_max": 2}
    head = _config(folder / "head", asked.hidden, 1)
    return {"method": "eagle", "model": head, "num_speculative_tokens": asked.drafts}


def _config(folder: Path, hidden: int, layers: int) -> str:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 2048,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    main()
