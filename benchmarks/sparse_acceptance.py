"""Verification of drafts under a sparse method: how many are accepted and what a step costs, against dense ones.

The draft model is the model itself, dense: so dense verification accepts every draft, and a sparse one rejects drafts
where it disagrees with dense attention. Long real text is continued, greedily. No draft model in use is that exact, so
this is the hardest case; `sparse_same_drafts` has the usual one, without the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from benchmarks.machine import describe_machine
from benchmarks.sparse_text import find_text, read_text
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.observability.step_record import StepRecord

DRAFTS = 4
# name: method, and whether drafts are verified
CONTENDERS: dict[str, tuple[str | None, bool]] = {
    "dense, verify": (None, True),
    "unlocked (GSA), verify": ("GSA", True),
    "locked (KVStar), verify": ("KVStar", True),
    "locked (KVStar), decode": ("KVStar", False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--ratio", type=float, default=0.1, help="sparse_ratio")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    rows = {name: measure(options, *contender) for name, contender in CONTENDERS.items()}
    print(
        f"{describe_machine()}; {options.prompts} prompts of {options.context} tokens, {DRAFTS} drafts, "
        f"{options.ratio:.0%} of blocks of {options.block_size}"
    )
    print(f"{'':<26}{'tokens/step':>12}{'against dense':>15}{'ms/step':>10}{'against decode':>16}")
    dense, decode = rows["dense, verify"], rows["locked (KVStar), decode"]
    for name, row in rows.items():
        share, cost = row["tokens_per_step"] / dense["tokens_per_step"], row["ms_per_step"] / decode["ms_per_step"]
        shown = f"{share:>14.1%}" if "verify" in name else f"{'':>14}"
        print(f"{name:<26}{row['tokens_per_step']:>12.2f} {shown}{row['ms_per_step']:>10.1f}{cost:>15.2f}x")
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


def measure(options: argparse.Namespace, method: str | None, drafts: bool) -> dict[str, float]:
    """Tokens per step of one request at a time, and median milliseconds of its decodes or verifications."""
    ucm: dict[str, Any] = {}
    if method is not None:
        ucm = {
            "ucm_sparse_method": method,
            "ucm_sparse_config": {method: {"sparse_ratio": options.ratio, "sparse_steps": "always"}},
        }
    draft = {"method": "draft_model", "model": str(options.model), "num_speculative_tokens": DRAFTS}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "phases.jsonl"
        engine = LLM(
            str(options.model),
            dtype="float32",
            max_model_len=options.context + options.new_tokens + options.block_size,
            max_num_seqs=1,
            max_num_batched_tokens=1024,
            block_size=options.block_size,
            additional_config={"ucm": {**ucm, "phase_log": str(log)}},
            **({"speculative_config": draft} if drafts else {}),
        )
        params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)
        for prompt in prompts(options):
            engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        core: Any = engine.llm_engine.engine_core
        core.engine_core.model_executor.shutdown()
        core.engine_core.scheduler.shutdown()
        steps = [step for step in read_phase_log(log)[1] if is_decode(step)]
    tokens = options.prompts * (options.new_tokens - 1)
    full = [step.forward_ms for step in steps if step.tokens == (1 + DRAFTS if drafts else 1)]
    return {"tokens_per_step": tokens / len(steps), "ms_per_step": statistics.median(full)}


def is_decode(step: StepRecord) -> bool:
    """True for a decode or a verification, that is, not a chunk of a prompt. The first decode follows the last
    chunk.
    """
    return step.tokens <= 1 + DRAFTS


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Pieces of a long text, one after the other."""
    tokens = AutoTokenizer.from_pretrained(options.model)(read_text(find_text())).input_ids
    if len(tokens) < options.prompts * options.context:
        raise SystemExit(f"the text has {len(tokens)} tokens, expected {options.prompts} x {options.context}")
    return [tokens[i * options.context : (i + 1) * options.context] for i in range(options.prompts)]


if __name__ == "__main__":
    main()
