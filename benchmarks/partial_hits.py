"""Partial hits (`ucm.kv_cache.partial_hits`) on and off: tokens computed again and time, for parallel sampling, beam
search and prompts with a common start.

`python -m benchmarks.partial_hits --model FOLDER [--block 128] [--rounds 3] [--json FILE]`. Both engines live in this
process and take turns; off is vLLM's own prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from rich.progress import track
from rich.table import Table
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console

PROMPT = 300
SHARING = 64
OWN = 20


class Figures(NamedTuple):
    """Figures of a workload on one engine. tokens: computed tokens. seconds: the median of the rounds."""

    tokens: int
    seconds: float


class Side:
    """An engine, and the tokens that its steps have computed."""

    def __init__(self, model: str, block: int, partial_hits: bool) -> None:
        self.llm = LLM(
            model=model,
            dtype="float32",
            block_size=block,
            max_model_len=1024,
            max_num_seqs=SHARING,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=2 << 30,
            seed=0,
            max_logprobs=16,
            disable_log_stats=True,
            additional_config={"ucm": {"kv_cache": {"partial_hits": partial_hits}}},
        )
        client: Any = self.llm.llm_engine.engine_core
        self._scheduler = client.engine_core.scheduler
        self.tokens = 0
        schedule = self._scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.tokens += output.total_num_scheduled_tokens
            return output

        self._scheduler.schedule = counting

    def run(self, work: Callable[[LLM, random.Random], None], seed: int) -> Figures:
        """A round on an empty prefix cache."""
        self.llm.reset_prefix_cache()
        self.tokens = 0
        begin = time.perf_counter()
        work(self.llm, random.Random(seed))
        return Figures(self.tokens, time.perf_counter() - begin)


def prompt(rng: random.Random, count: int = PROMPT) -> list[int]:
    return [rng.randrange(1000, 20000) for _ in range(count)]


def parallel_sampling(llm: LLM, rng: random.Random) -> None:
    params = SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=16, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt(rng)}], params, use_tqdm=False)


def beam_search(llm: LLM, rng: random.Random) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=64, ignore_eos=True)
    llm.beam_search([{"prompt_token_ids": prompt(rng)}], params)


def common_start(llm: LLM, rng: random.Random) -> None:
    start = prompt(rng)
    asked: list[Any] = [{"prompt_token_ids": start + prompt(rng, OWN)} for _ in range(SHARING)]
    llm.generate(asked, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)


WORK: dict[str, Callable[[LLM, random.Random], None]] = {
    f"n = 8, a prompt of {PROMPT}": parallel_sampling,
    f"4 beams, 64 tokens, a prompt of {PROMPT}": beam_search,
    f"{SHARING} requests that share {PROMPT} of {PROMPT + OWN}": common_start,
}


def measure(model: str, block: int, rounds: int) -> dict[str, dict[str, Figures]]:
    """Measures by workload the figures of `off` and `on`, which take turns."""
    sides = {"off": Side(model, block, False), "on": Side(model, block, True)}
    found: dict[str, dict[str, Figures]] = {}
    for name, work in WORK.items():
        rows: dict[str, list[Figures]] = {side: [] for side in sides}
        for number in track(range(rounds + 1), name, transient=True):
            for side, engine in sides.items():
                rows[side].append(engine.run(work, number))
        # the first round meets shapes for the first time
        found[name] = {
            side: Figures(figures[-1].tokens, median(one.seconds for one in figures[1:]))
            for side, figures in rows.items()
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2-135m-instruct")
    parser.add_argument("--block", type=positive, default=128, help="tokens of a block")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    found = measure(args.model, args.block, args.rounds)
    console, table = report_console(least_width=110), Table(title=f"Partial hits, blocks of {args.block}")
    for column in ("workload", "tokens, off", "tokens, on", "seconds, off", "seconds, on", "times as fast"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for name, sides in found.items():
        off, on = sides["off"], sides["on"]
        row = f"{off.tokens:,}", f"{on.tokens:,}", f"{off.seconds:.2f}", f"{on.seconds:.2f}"
        table.add_row(name, *row, f"{off.seconds / on.seconds:.2f}")
    console.print(describe_machine())
    console.print(table)
    if args.json:
        figures = {name: {side: one._asdict() for side, one in sides.items()} for name, sides in found.items()}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
