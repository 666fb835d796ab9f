"""Decode steps after arrivals and ends, with compaction and without, of engines in one process that take turns.

`python -m benchmarks.compaction_step [--requests N] [--context N]`. In several rounds the same number of further
requests arrive and are aborted, so that the blocks of the remaining ones lie between free ones. Then all of them
decode. Random weights.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.table import Table
from vllm import LLM, SamplingParams

from benchmarks.positive import positive
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.output import report_console

SIDES: Mapping[str, dict[str, Any]] = {
    "gathered": {"attention": {"contiguous_pa": False}},
    "slices": {"attention": {"contiguous_pa": True}},
    "auto": {},
    "auto, compaction": {"kv_cache": {"compaction": True}},
    "slices, compaction": {"attention": {"contiguous_pa": True}, "kv_cache": {"compaction": True}},
}
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
BLOCK = 16
ROUNDS = 3


class Side:
    """An engine whose requests come and go as every other's."""

    def __init__(self, folder: Path, name: str, requests: int, context: int, steps: int) -> None:
        self._log = folder / f"{name}.jsonl"
        longest = context + 4 * steps
        blocks = 2 * requests * (longest // BLOCK + 1) + 1
        self._llm = LLM(
            str(folder),
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=2 * requests,
            max_num_batched_tokens=2048,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            additional_config={"ucm": {"phase_log": str(self._log), **SIDES[name]}},
        )
        self._engine = self._llm.llm_engine
        self._rng = random.Random(0)
        self._params = SamplingParams(temperature=0, max_tokens=4 * steps, ignore_eos=True, detokenize=False)
        self._context = context
        self._live: list[str] = []
        self._count = 0
        self.seconds: list[float] = []

    def churn(self, requests: int, steps: int) -> None:
        """Doubles the requests by new arrivals, and ends the same number."""
        while len(self._live) < 2 * requests:
            prompt = [self._rng.randrange(3, 2000) for _ in range(self._rng.randint(self._context // 2, self._context))]
            self._count += 1
            self._live.append(f"r{self._count}")
            self._engine.add_request(self._live[-1], {"prompt_token_ids": prompt}, self._params)
        for _ in range(steps):
            self._engine.step()
        self._rng.shuffle(self._live)
        self._engine.abort_request(self._live[requests:])
        del self._live[requests:]

    def step(self) -> None:
        begin = time.perf_counter()
        self._engine.step()
        self.seconds.append(time.perf_counter() - begin)

    @property
    def density(self) -> float:
        """Returns the share of blocks in use, up to the last one."""
        core: Any = self._engine.engine_core
        tables = core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        held = [block.block_id for blocks in tables.values() for block in blocks]
        return (len(held) + 1) / (max(held) + 1)

    def blocks_read(self, steps: int) -> float:
        """Returns the blocks of the unique part, in the last steps."""
        return statistics.median(step.bucket.unique_blocks for step in read_phase_log(self._log)[1][-steps:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=positive, default=16, help="that decode (default: %(default)s)")
    parser.add_argument("--context", type=positive, default=400, help="tokens, at most (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=120, help="that are measured (default: %(default)s)")
    args = parser.parse_args(argv)
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = args.context + 4 * args.steps
        LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=longest, **SHAPE).save_pretrained(
            folder
        )
        sides = {side: Side(folder, side, args.requests, args.context, args.steps) for side in SIDES}
        for side in sides.values():
            for _ in range(ROUNDS):
                side.churn(args.requests, steps=12)
            # by then all pending moves are done
            for _ in range(args.steps):
                side.step()
            side.seconds.clear()
        for number in range(args.steps):
            # none is always the one behind another
            for side in list(sides.values())[:: 1 if number % 2 else -1]:
                side.step()
        report_console(least_width=110).print(_table(sides, args.steps))
    return 0


def _table(sides: Mapping[str, Side], steps: int) -> Table:
    table = Table("reading", "density", "blocks read", "ms per step", "to gathered")
    gathered = statistics.median(sides["gathered"].seconds)
    for name, side in sides.items():
        median = statistics.median(side.seconds)
        read = side.blocks_read(steps)
        table.add_row(name, f"{side.density:.2f}", f"{read:.0f}", f"{1e3 * median:.2f}", f"{gathered / median:.2f}x")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
