"""Recipes that a device would compile after warm-up: steps of every trace mix, scaled down, through a tiny model.

Runs the worker's whole step (request table, planner, buckets, graphs, sampling) with every operator hashed. A step
without a bucket, or a graph that was never captured, raises.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

from benchmarks.mix_traffic import MixTraffic, scaled
from vllm_gaudi_ucm.cli.trace_mix import MIXES
from vllm_gaudi_ucm.graphs.cost import CostModel
from vllm_gaudi_ucm.graphs.device_figures import DEVICES
from vllm_gaudi_ucm.graphs.model_figures import LLAMA_8B
from vllm_gaudi_ucm.phase_log import read_phase_log

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.limits import Limits
    from vllm_gaudi_ucm.runner.model_runner import ModelRunner

VOCABULARY = 128
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}


class Serving(NamedTuple):
    """A runner whose buckets are warm, and where its phase log is written."""

    runner: ModelRunner
    phase_log: Path
    start_seconds: float


class Counts(NamedTuple):
    """What the steps of one mix came to.

    runs: forward graphs that were replayed; more than steps where steps ran in parts. phases: runs by true phase.
    buckets: different forward buckets that were used. new_recipes: compiled while serving.
    """

    steps: int
    runs: int
    phases: dict[str, int]
    buckets: int
    graphs: int
    new_recipes: int
    warm_up_seconds: float
    milliseconds_per_step: float


def main() -> int:
    """Prints one line for each mix; 1 if anything was compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--warm-up", choices=("full", "skeleton"), default="full")
    parser.add_argument("--max-graphs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    graphs = {"warm_up": args.warm_up, "max_graphs": args.max_graphs, "recipe_check": "count"}
    found = {}
    for mix in args.mixes:
        with tempfile.TemporaryDirectory() as folder, serving(mix, Path(folder), graphs) as server:
            found[mix] = run(mix, server, args.steps, args.seed)
    for line in table(found):
        print(line)
    if args.json:
        args.json.write_text(json.dumps({mix: counts._asdict() for mix, counts in found.items()}, indent=2) + "\n")
    return int(any(counts.new_recipes for counts in found.values()))


@contextmanager
def serving(mix: str, folder: Path, graphs: dict[str, Any]) -> Iterator[Serving]:
    """An engine with the mix's limits, scaled, over a model of random weights in `folder`."""
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"], **MODEL).save_pretrained(folder)
    limits = scaled(MIXES[mix]).limits
    log = folder / "phases.jsonl"
    ucm = {"phase_log": str(log), "graphs": {"mode": "eager", **graphs}}
    start = time.perf_counter()
    llm = LLM(model=str(folder), additional_config={"ucm": ucm}, **_options(limits))
    seconds = time.perf_counter() - start
    client: Any = llm.llm_engine.engine_core
    core = client.engine_core
    try:
        yield Serving(core.model_executor.driver_worker.worker.model_runner, log, seconds)
    finally:
        core.model_executor.shutdown()
        core.scheduler.shutdown()


def _options(limits: Limits) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": limits.num_blocks,
    }


def run(mix: str, server: Serving, steps: int, seed: int = 0) -> Counts:
    """Drives the runner as the engine does, and counts."""
    runner = server.runner
    static = runner.static
    assert static is not None, "the engine runs at static shapes"
    shape = scaled(MIXES[mix])
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, shape.limits.block_size)
    traffic = MixTraffic(shape, cost, seed, VOCABULARY)
    before = len(read_phase_log(server.phase_log)[1])
    start = time.perf_counter()
    for message in traffic.steps(steps, sampling):
        runner.execute_model(message)
        runner.sample_tokens(None)
    seconds = time.perf_counter() - start
    records = read_phase_log(server.phase_log)[1][before:]
    return Counts(
        steps=steps,
        runs=len(records),
        phases=dict(Counter(record.bucket.phase for record in records)),
        buckets=len({record.padded.forward for record in records}),
        graphs=static.execution.ready.progress[0],
        new_recipes=static.stages.new_recipes,
        warm_up_seconds=round(static.summary().seconds, 2),
        milliseconds_per_step=round(1e3 * seconds / steps, 3),
    )


def sampling(rng: random.Random) -> SamplingParams:
    """What a request asks of the sampler: mostly greedy or plainly random, sometimes anything else."""
    params = SamplingParams(temperature=rng.choice([0.0, 0.0, 0.8, 1.0]))
    if rng.random() < 0.3:
        params.top_p = rng.choice([0.5, 0.95])
    if rng.random() < 0.2:
        params.top_k = rng.choice([1, 20])
    if rng.random() < 0.2:
        params.logprobs = rng.choice([0, 5, 20])
    if rng.random() < 0.2:
        params.repetition_penalty = 1.2
    if rng.random() < 0.05:
        params.seed = rng.randrange(100)
    return params


def table(found: dict[str, Counts]) -> list[str]:
    """One line for each mix."""
    lines = [
        f"{'mix':14}{'steps':>8}{'runs':>8}{'graphs':>8}{'buckets':>9}{'warm-up s':>11}{'ms/step':>9}"
        f"{'recipes after warm-up':>23}  phases"
    ]
    for mix, counts in found.items():
        phases = " ".join(f"{phase} {number}" for phase, number in sorted(counts.phases.items()))
        lines.append(
            f"{mix:14}{counts.steps:>8}{counts.runs:>8}{counts.graphs:>8}{counts.buckets:>9}"
            f"{counts.warm_up_seconds:>11}{counts.milliseconds_per_step:>9}{counts.new_recipes:>23}  {phases}"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
