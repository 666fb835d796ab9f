"""An engine over a tiny model with the limits of a trace mix, scaled down, whose worker is driven step by step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

from benchmarks.mix_scale import scaled
from benchmarks.mix_sparse import METHODS, sparse_config
from vllm_gaudi_ucm.observability.room_metrics import SelectionTotals
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Mix

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.start.model_runner import ModelRunner

VOCABULARY = 128
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}


class Serving(NamedTuple):
    """A runner whose buckets are warm, the path of its phase log, and the settings of the engine. // mix: scaled.
    sparse, drafts: see `serving`.
    """

    mix: Mix
    runner: ModelRunner
    phase_log: Path
    sparse: str
    drafts: int

    @property
    def totals(self) -> SelectionTotals:
        """Returns the totals of the sparse method so far."""
        worker = self.runner.parts.sparse
        return SelectionTotals() if worker is None or worker.state is None else worker.state.totals


@contextmanager
def serving(
    mix: str, folder: Path, graphs: dict[str, Any], sparse: str = "none", drafts: int = 0, scale: int = 1
) -> Iterator[Serving]:
    """An engine with the mix's limits, scaled, over a model of random weights in `folder`.

    sparse: a method of `benchmarks.mix_sparse.METHODS`, or "none". drafts: most drafts of a request. scale: see
    `benchmarks.mix_scale.scaled`.
    """
    from transformers import LlamaConfig

    # one more layer if one of them is dense
    layers = MODEL["num_hidden_layers"] + len(METHODS.get(sparse, {}).get("dense_layers", ()))
    LlamaConfig(architectures=["LlamaForCausalLM"], **{**MODEL, "num_hidden_layers": layers}).save_pretrained(folder)
    log = folder / "phases.jsonl"
    ucm = {"phase_log": str(log), "graphs": {"mode": "eager", **graphs}, **sparse_config(sparse)}
    shape = scaled(MIXES[mix], scale)
    llm = LLM(model=str(folder), additional_config={"ucm": ucm}, **_options(shape.limits, drafts))
    client: Any = llm.llm_engine.engine_core
    core = client.engine_core
    try:
        yield Serving(shape, core.model_executor.driver_worker.worker.model_runner, log, sparse, drafts)
    finally:
        core.model_executor.shutdown()
        core.scheduler.shutdown()


def _options(limits: Limits, drafts: int) -> dict[str, Any]:
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
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
        **({"speculative_config": ngram} if drafts else {}),
    }


def sampling(rng: random.Random) -> SamplingParams:
    """Draws the sampling parameters of a request: mostly greedy or plainly random, sometimes any others."""
    params = SamplingParams(temperature=rng.choice([0.0, 0.0, 0.8, 1.0]))
    if rng.random() < 0.3:
        params.top_p = rng.choice([0.5, 0.95])
    if rng.random() < 0.2:
        params.top_k = rng.choice([1, 20])
    if rng.random() < 0.2:
        params.logprobs = rng.choice([0, 5, 20])
    if rng.random() < 0.2:
        params.repetition_penalty = 1.2
    if rng.random() < 0.1:
        params.extra_args = {"ucm_sparse": False}
    if rng.random() < 0.05:
        params.seed = rng.randrange(100)
    return params
