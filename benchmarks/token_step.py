"""The decode steps of two engines in one process that take turns: a slot for each token, and blocks of 128."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.table import Table
from vllm import LLM, SamplingParams

from vllm_gaudi_ucm.observability.phase_log import read_phase_log

# the shape of the demo model with fewer layers; its weights do not matter
SMALL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
BLOCK = 128
VOCABULARY = 4096


@dataclass(frozen=True)
class StepTimes:
    """Medians of decode steps.

    new_tokens: tokens decoded in a round; the slots of requests that decode together are interleaved.
    wall, worker, plan: ratio of tokens to blocks of whole steps, of the worker's part, and of planning in ms.
    entries: entries of the unique part; for blocks, the ones that are read.
    """

    requests: int
    context: int
    new_tokens: int
    block_ms: float
    token_ms: float
    worker_ratio: float
    block_plan_ms: float
    token_plan_ms: float
    block_entries: float
    token_entries: float

    @property
    def ratio(self) -> float:
        return self.token_ms / self.block_ms


def measure(
    requests: int = 32,
    context: int = 440,
    rounds: Sequence[int] = (8, 128),
    repeats: int = 4,
    shape: dict[str, Any] | None = None,
    graphs: str = "off",
) -> list[StepTimes]:
    """A row for each number of new tokens. The first round of each engine does not count: it computes the prompts,
    which come from the prefix cache later."""
    from transformers import LlamaConfig

    longest = context + max(rounds) + BLOCK
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=VOCABULARY,
            max_position_embeddings=longest,
            **(SMALL if shape is None else shape),
        ).save_pretrained(folder)
        engines = {kind: _Side(folder, kind, requests, longest, graphs) for kind in ("block", "token")}
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, VOCABULARY, (requests, context), generator=generator).tolist()
        return [_row(engines, prompts, new_tokens, repeats) for new_tokens in rounds]


def _row(engines: dict[str, _Side], prompts: list[list[int]], new_tokens: int, repeats: int) -> StepTimes:
    walls: dict[str, list[float]] = {kind: [] for kind in engines}
    records: dict[str, list[Any]] = {kind: [] for kind in engines}
    for repeat in range(1 + repeats):
        # neither is always the first
        for kind, engine in list(engines.items())[:: 1 if repeat % 2 else -1]:
            seconds, steps = engine.round(prompts, new_tokens)
            if repeat:
                walls[kind] += seconds
                records[kind] += steps

    def median(kind: str, what: Any) -> float:
        return statistics.median(what(step) for step in records[kind])

    def worker(kind: str) -> float:
        return median(kind, lambda step: step.plan_ms + step.forward_ms + step.sample_ms)

    return StepTimes(
        len(prompts),
        len(prompts[0]),
        new_tokens,
        1e3 * statistics.median(walls["block"]),
        1e3 * statistics.median(walls["token"]),
        worker("token") / worker("block"),
        median("block", lambda step: step.plan_ms),
        median("token", lambda step: step.plan_ms),
        median("block", lambda step: step.bucket.unique_blocks),
        median("token", lambda step: step.bucket.unique_blocks),
    )


# of no effect at true shapes
_WARM_UP = {"warm_up": "full", "max_graphs": 24}


class _Side:
    """An engine, and its phase log."""

    def __init__(self, folder: Path, kind: str, requests: int, longest: int, graphs: str) -> None:
        self._log = folder / f"{kind}.jsonl"
        self._seen = 0
        self._number = 0
        slots = requests * (longest + BLOCK)
        options: dict[str, Any] = {"num_gpu_blocks_override": slots // BLOCK + 1}
        kv_cache: dict[str, Any] = {"granularity": kind}
        if kind == "token":
            options, kv_cache = {}, {**kv_cache, "max_total_token_num": slots}
        self._engine = LLM(
            str(folder),
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=requests,
            max_num_batched_tokens=max(1024, requests),
            block_size=BLOCK,
            kv_cache_memory_bytes=2 << 30,
            additional_config={
                "ucm": {"phase_log": str(self._log), "kv_cache": kv_cache, "graphs": {"mode": graphs, **_WARM_UP}}
            },
            **options,
        ).llm_engine

    def round(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[Any]]:
        """Seconds and records of the steps in which all requests decode."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._number += 1
            self._engine.add_request(f"r{self._number}", {"prompt_token_ids": prompt}, params)
        seconds = []
        while self._engine.has_unfinished_requests():
            begin = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - begin)
        steps = read_phase_log(self._log)[1]
        new, self._seen = steps[self._seen :], len(steps)
        decodes = [
            (time, step)
            for time, step in zip(seconds, new, strict=False)
            if step.tokens == step.requests == len(prompts) and step.prompts == 0
        ]
        # the first computes the last token of prompts that are cached
        return [time for time, _ in decodes[1:]], [step for _, step in decodes[1:]]


def step_table(rows: Sequence[StepTimes]) -> Table:
    table = Table("requests", "new tokens", "block, ms", "token, ms", "step", "worker", "plan, ms", "entries")
    for row in rows:
        table.add_row(
            f"{row.requests} of {row.context}",
            str(row.new_tokens),
            f"{row.block_ms:.2f}",
            f"{row.token_ms:.2f}",
            f"{row.ratio:.3f}x",
            f"{row.worker_ratio:.3f}x",
            f"{row.block_plan_ms:.2f} / {row.token_plan_ms:.2f}",
            f"{row.block_entries:.0f} / {row.token_entries:.0f}",
        )
    return table
