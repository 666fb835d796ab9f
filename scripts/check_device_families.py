"""Serves a tiny random model of each family on the device that VLLM_GAUDI_UCM_DEVICE names, beside Hugging Face.

For machines that CI does not have: needs no network and no model file. Prompts come in chunks, some requests are
preempted, and the longest prompt comes again and hits the prefix cache. Every step runs in a bucket, as a graph.
With several workers these compare in each step what they run. `--quantised` serves checkpoints whose linear layers and
experts are quantised, beside Transformers with the exact values of the same weights.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_families.py [--families NAME ...] [--more]
       [--tensor-parallel N] [--stages N] [--quantised "fp8 per block"]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# behind what is installed: the checkout's own package is not the installed one
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from transformers import PreTrainedConfig

from tests.engine.quantised_models import SCHEMES, compressed_tensors, write_quantised
from tests.engine.reference_model import ReferenceModel
from tests.engine.rounded_latents import rounding_engine
from tests.engine.serving import Engine, assert_same
from tests.engine.tiny_models import FAMILIES, make_config, make_model
from tests.engine.window_models import GPT_OSS, LLAMA4, MODELS, window_config
from tests.engine.worker_processes import EngineOfWorkers

LENGTH = 48
# a cache of 27 blocks of 16 has room for few requests, of up to 16 blocks
TIGHT = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
BLOCKS = 28
WORKERS = {"tensor_parallel_size", "pipeline_parallel_size"}
GRAPHS = {"graphs": {"max_graphs": 8, "warm_up": "full"}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# every block is chosen, so the tokens are those of dense attention
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
WINDOWS = {**MODELS, "gpt_oss": GPT_OSS, "llama4_text": LLAMA4}
NARROW, NARROW_FAMILIES = "8-bit cache", ("deepseek_v2",)
# vLLM switches the growth of Llama 4's queries on for long contexts alone, Transformers always
TUNED = {"llama4_text": {"override_generation_config": {"attn_temperature_tuning": True}}}


def configs() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Every family that tests serve, and one whose layers all have a window."""
    yield from ((name, make_config(name)) for name in FAMILIES)
    yield "mistral, window", make_config("mistral", sliding_window=20)
    yield from ((name, window_config(name)) for name in WINDOWS)


def more_layers(config: PreTrainedConfig, stages: int) -> PreTrainedConfig:
    """vLLM's GLM-4.5 wants a layer with experts in every stage, and the first one of the model has none."""
    if config.model_type == "glm4_moe" and stages > 1:
        config.num_hidden_layers = 2 * stages
    return config


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (count,), generator=generator).tolist() for count in (1, 190, 64, 150, 17, 90)]


def serve(name: str, model: Path, meant: Path, ucm: dict[str, Any], **more: Any) -> str:
    """What has run. meant: the model for Transformers. Raises AssertionError where a token is not that of it."""
    prompts = make_prompts()
    options: dict[str, Any] = {**TIGHT, **TUNED.get(name, {}), **more}
    if name not in WINDOWS:
        options["num_gpu_blocks_override"] = BLOCKS
    kind = EngineOfWorkers if WORKERS & options.keys() else Engine
    with kind(model, {**GRAPHS, **ucm}, **options) as engine:
        answers = engine.greedy(prompts, LENGTH)
        again = engine.greedy([prompts[1]], LENGTH) + engine.greedy([prompts[1]], LENGTH)
        preempted = engine.preemptions
        engine.check_idle()
    reference = ReferenceModel(meant, "eager")
    reference.assert_greedy([*prompts, prompts[1], prompts[1]], [*answers, *again])
    hit = again[1].cached_tokens
    assert hit >= 160, f"{hit} tokens of a prefix hit, expected most of 190"
    return f"{len(answers) + 2} answers equal, {preempted} preempted, a prefix hit of {hit} tokens"


def serve_narrow(model: Path) -> str:
    """Latents in 8-bit floats, beside an engine whose cache holds what they stand for: the same tokens."""
    prompts, options = make_prompts(), {**TIGHT, "num_gpu_blocks_override": BLOCKS}
    with Engine(model, GRAPHS, kv_cache_dtype="fp8", **options) as engine:
        found = engine.greedy(prompts, LENGTH)
    with rounding_engine(model, ucm=GRAPHS, **options) as engine:
        expected = engine.greedy(prompts, LENGTH)
    assert_same(found, expected)
    return f"{len(found)} answers equal those of rounded rows"


def engines(name: str, asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What each is, its options of ours, and of vLLM's."""
    ranks, stages = asked.tensor_parallel, asked.stages
    if ranks > 1 or stages > 1:
        workers = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        ours = {"graphs": {"max_graphs": 3, "warm_up": "skeleton"}, "distributed": {"check_ranks": True}}
        yield f"{ranks} ranks, {stages} stages", ours, workers
        return
    yield "dense", {}, {}
    if name in NARROW_FAMILIES and asked.quantised is None:
        yield NARROW, {}, {}
    if asked.more:
        swap = {"preemption": {"mode": "swap", "host_memory": 4 << 20}}
        yield "drafts and swaps", swap, {"speculative_config": DRAFTS}
        if name not in WINDOWS and "window" not in name:
            yield "all blocks chosen", {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}, {}


def written(model: Path, scheme: str | None) -> tuple[Path, Path]:
    """The model to serve, and the one that Transformers computes.

    Raises ValueError where no weight is quantised: names of layers that the writer does not know.
    """
    if scheme is None:
        return model, model
    config, choose = compressed_tensors({r".*\.layers\..*(_proj|_with_mqa|\.w[123])": scheme})
    quantised, meant = write_quantised(model, model / "quantised", config, choose)
    if (quantised / "model.safetensors").stat().st_size >= (meant / "model.safetensors").stat().st_size:
        raise ValueError("no weight of it was quantised")
    return quantised, meant


def main() -> int:
    """Checks each family; the exit status says whether all were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", help="of them; all by default")
    parser.add_argument("--more", action="store_true", help="also with drafts and swapped blocks, and a sparse method")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of each engine")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="stages of each engine's pipeline")
    # rows of 8-bit integers are rounded on some devices, and Transformers' are not
    exact = [name for name in SCHEMES if not name.startswith("int8")]
    parser.add_argument("--quantised", choices=exact, help="serves checkpoints of this scheme")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs():
            if options.families and name not in options.families:
                continue
            model = make_model(Path(folder) / name.replace(", ", "-"), more_layers(config, options.stages))
            for what, ucm, more in engines(name, options):
                begin = time.perf_counter()
                try:
                    if what == NARROW:
                        said = serve_narrow(model)
                    else:
                        said = serve(name, *written(model, options.quantised), ucm, **more)
                except Exception as error:  # the next one may be right
                    wrong += 1
                    said = f"WRONG: {type(error).__name__}: {str(error)[:400]}"
                what = f"{what}, {options.quantised}" if options.quantised else what
                print(f"{name}, {what}: {said} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
