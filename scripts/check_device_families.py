"""Serves a tiny random model of each family on the device in VLLM_GAUDI_UCM_DEVICE, and compares with Hugging Face.

For machines that CI does not have: needs no network and no model file. Prompts come in chunks, some requests are
preempted, and the longest prompt comes again and hits the prefix cache. Every step runs in a bucket, as a graph.
On Gaudi, where compilations are counted, none may happen after the warm-up.
`--more` adds other features, each in an engine of its own; --features names some of all.
Several workers compare in each step what they run. `--quantised` serves checkpoints whose linear layers and experts are
quantised, and compares with Transformers on the exact values of the same weights. Rows are rounded there if the
product of a Gaudi rounds them.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_families.py [--families NAME ...] [--more]
       [--features NAME ...] [--tensor-parallel N] [--stages N] [--engines N] [--quantised "fp8 per block"]
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# after installed packages: the checkout's own package is not the installed one
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.engine.engine_group import serve_by_engines
from tests.engine.hybrids import HYBRIDS, longer_hybrid
from tests.engine.more_models import MORE, WITH_STATES, more_config
from tests.engine.narrowed_linears import NarrowedModel
from tests.engine.picture_models import PictureReference
from tests.engine.pictured_families import OPTIONS as PICTURED
from tests.engine.pictured_families import WRITERS, pictured_prompts
from tests.engine.quantised_models import SCHEMES, compressed_tensors, write_gpt_oss, write_quantised
from tests.engine.reference_model import ReferenceModel
from tests.engine.rounded_cache import assert_follows, rounding_engine
from tests.engine.serving import NEAR_TIE, Answer, Engine, assert_same
from tests.engine.shared_keys import MODELS as SHARED_KEYS
from tests.engine.shared_keys import divide_gates, smaller_config, write_model
from tests.engine.test_connector import file_store, transfer
from tests.engine.test_local_attention import BLOOM
from tests.engine.tiny_models import FAMILIES, make_config, make_model
from tests.engine.window_models import GPT_OSS, LLAMA4, MODELS, window_config
from tests.engine.worker_processes import EngineOfWorkers, count_compilations
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.layers.quantised.method import largest_e4m3

LENGTH = 48
# of engines that show one feature without preemptions
SHORT = 16
# a cache of 23 blocks of 16 has room for few requests, of up to 16 blocks
TIGHT = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
BLOCKS = 24
WORKERS = {"tensor_parallel_size", "pipeline_parallel_size"}
GRAPHS = {"graphs": {"max_graphs": 8, "warm_up": "full"}}
# prompts, decodes, and logits
FEW_GRAPHS = {"graphs": {"max_graphs": 3, "warm_up": "skeleton"}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# every block is chosen, so the tokens equal dense attention's
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
WINDOWS = {**MODELS, "gpt_oss": GPT_OSS, "llama4_text": LLAMA4}
IN_ALL_LAYERS = "mistral, window"
# as in models of 26B and 31B
OWN_KEYS = "gemma4, own keys"
# a size that fits one request of full length fits all of them
ROOM_FOR_ALL = (IN_ALL_LAYERS, "llama4_text")
# of models with windows, which keep fewer blocks of a request, and in several groups of layers
WINDOW_BLOCKS = {
    "gemma2": 30,
    "gpt_oss": 30,
    "gemma3_text": 40,
    "llama4_text": 52,
    "gemma3n_text": 30,
    "gemma4_text": 20,
}
STATES = (*HYBRIDS, WITH_STATES)
# vLLM serves them by Transformers' classes, and rewrites these in the process
REWRITTEN = ("gpt_bigcode", "hunyuan_v1_dense", "hunyuan_v1_moe")
# prefix caching of models with states
KEPT = {"kv_cache": {"kept_states": 8}}
ONE_DEVICE = ("dense", "8-bit cache")
# a logprob may be off by this if numbers of the cache are rounded the other way
ROUNDED = 0.01
# layers that `--quantised` quantises: of a model with pictures its decoder's
LINEAR = r"(?!.*(vision|visual)).*(_proj(_\w+)?|\.w[123]|\.fc[12]|\.query_key_value|\.dense\w*|\.c_\w+)$"
# schemes whose products round rows on a Gaudi
ROUND_ROWS = ("fp8 per tensor", "fp8 per channel")
# Transformers' own logprobs of Zamba2 are off by 1.0e-3 in float32
NEAR = {"zamba2": 2e-3}
# states sum up in another order over a whole prompt: numbers far from a middle are rounded the other way, too
NEAR_WITH_STATES = 0.1
# vLLM switches the growth of Llama 4's queries on for long contexts alone, Transformers always
TUNED = {"llama4_text": {"override_generation_config": {"attn_temperature_tuning": True}}}


def families(stages: int = 1) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """Yields the name of each family, and what writes a model of it. stages: over which its layers are divided."""
    for name, config in configs(stages):
        make = write_model if name in (*SHARED_KEYS, OWN_KEYS) else make_model
        yield name, partial(make, config=more_layers(config, stages))
    # vLLM's classes import it
    if importlib.util.find_spec("torchvision"):
        yield from WRITERS.items()


def configs(stages: int) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yields every family that tests serve without pictures, one whose layers all have a window, and one with ALiBi."""
    yield from ((name, make_config(name)) for name in FAMILIES)
    yield IN_ALL_LAYERS, make_config("mistral", sliding_window=20)
    yield "bloom", AutoConfig.for_model("bloom", **BLOOM)
    yield from ((name, window_config(name)) for name in WINDOWS)
    yield from ((name, smaller_config(name)) for name in SHARED_KEYS)
    yield OWN_KEYS, smaller_config("gemma4_text", num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    yield from ((name, longer_hybrid(name, stages)) for name in HYBRIDS)
    yield from ((name, more_config(name)) for name in MORE)


def more_layers(config: PreTrainedConfig, stages: int) -> PreTrainedConfig:
    """vLLM's GLM-4.5 wants a layer with experts in every stage, and the first one of the model has none."""
    if config.model_type == "glm4_moe" and stages > 1:
        config.num_hidden_layers = 2 * stages
    return config


def make_prompts(name: str) -> list[Any]:
    """Returns tokens of six prompts, or text and pictures."""
    if name in WRITERS:
        return pictured_prompts(name)
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (count,), generator=generator).tolist() for count in (1, 190, 64, 150, 17, 90)]


class Case(NamedTuple):
    """An engine to check.

    ucm: options of the plugin. options: options of vLLM. length: tokens of an answer. scheme: of quantised weights.
    """

    what: str
    ucm: dict[str, Any]
    options: dict[str, Any]
    length: int = LENGTH
    scheme: str | None = None


def sizes(name: str) -> dict[str, Any]:
    """Returns the sizes of the cache and of steps."""
    cached = {"enable_prefix_caching": True} if name in STATES else {}
    pictured = PICTURED if name in WRITERS else {}
    return {
        **TIGHT,
        **TUNED.get(name, {}),
        **cached,
        **pictured,
        "num_gpu_blocks_override": WINDOW_BLOCKS.get(name, BLOCKS),
    }


def serve(name: str, model: Path, meant: Path, case: Case) -> str:
    """Serves a case and describes it. meant: the model for Transformers. Raises AssertionError if a token differs from
    its token.
    """
    prompts, options = make_prompts(name), {**sizes(name), **case.options}
    kind = EngineOfWorkers if WORKERS & options.keys() else Engine
    with kind(model, {**GRAPHS, **case.ucm}, **options) as engine:
        warm = compilations(engine)
        answers = engine.greedy(prompts, case.length)
        again = engine.greedy([prompts[1]], case.length) + engine.greedy([prompts[1]], case.length)
        preempted = engine.preemptions
        engine.check_idle()
        if case.what != "true shapes":
            assert_none_compiled(engine, warm)
        if "ucm_sparse_method" in case.ucm:
            sparse = engine.runner.parts.sparse
            assert sparse is not None
            assert sparse.state is not None
            assert sum(sparse.state.totals.modes.values()), "no step chose blocks"
    assert_greedy(name, meant, case, [*prompts, prompts[1], prompts[1]], [*answers, *again])
    hit = again[1].cached_tokens
    assert hit >= 160, f"{hit} tokens of a prefix hit, expected most of 190"
    few = name not in ROOM_FOR_ALL and options["num_gpu_blocks_override"] is not None and case.length == LENGTH
    assert preempted or not few, "no request was preempted, expected some"
    return f"{len(answers) + 2} answers equal, {preempted} preempted, a prefix hit of {hit} tokens"


def assert_greedy(name: str, meant: Path, case: Case, prompts: list[Any], answers: list[Answer]) -> None:
    """Compares answers with Transformers, which rounds rows if the products of the device do."""
    # a request whose picture cannot be encoded ends early
    lengths = [len(answer.tokens) for answer in answers]
    assert lengths == [case.length] * len(prompts), f"answers of {lengths} tokens, expected {case.length} each"
    if name not in REWRITTEN:
        compare(name, meant, case, prompts, answers)
        return
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(compare, name, meant, case, prompts, answers).result()


def compare(name: str, meant: Path, case: Case, prompts: list[Any], answers: list[Answer]) -> None:
    reference = PictureReference(meant) if name in WRITERS else ReferenceModel(meant, "eager")
    divide_gates(reference.model, case.options.get("tensor_parallel_size", 1))
    if case.scheme in ROUND_ROWS and os.environ.get("VLLM_GAUDI_UCM_DEVICE") == "hpu":
        near = NEAR_WITH_STATES if name in STATES else NEAR_TIE
        NarrowedModel(reference, LINEAR, largest_e4m3("hpu")).assert_greedy(prompts, answers, near)
    else:
        reference.assert_greedy(prompts, answers, near=NEAR.get(name, NEAR_TIE))


def serve_divided(name: str, model: Path, meant: Path, case: Case, count: int) -> str:
    """Serves by engines that share out requests, and the experts of a mixture."""
    prompts = make_prompts(name)
    counted = os.environ.get("VLLM_GAUDI_UCM_DEVICE") == "hpu"
    options = {**sizes(name), **case.options}
    found = serve_by_engines(model, case.ucm, prompts, case.length, count, counted, **options)
    for answers in found:
        assert_greedy(name, meant, case, prompts, answers)
    return f"{len(found) * len(prompts)} answers equal"


def serve_stored(name: str, model: Path, meant: Path, case: Case) -> str:
    """Serves by two servers over one folder: the second loads the blocks of the first."""
    prompts, found = make_prompts(name), list[list[Answer]]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            config = transfer(file_store(Path(folder)))
            with Engine(model, case.ucm, kv_transfer_config=config, **sizes(name)) as engine:
                warm = compilations(engine)
                found.append(engine.alone(prompts, case.length))
                for _ in range(3):
                    engine.step()
                assert_none_compiled(engine, warm)
    for answers in found:
        assert_greedy(name, meant, case, prompts, answers)
    first, second = (answers[1].cached_tokens for answers in found)
    assert not first, f"{first} tokens loaded by the first server, expected none"
    assert second >= 160, f"{second} tokens loaded by the second server, expected most of 190"
    return f"{2 * len(prompts)} answers equal, {second} tokens loaded"


def serve_narrow(name: str, model: Path, case: Case) -> str:
    """Compares a cache of 8-bit floats with one that holds their values in a wider dtype: the same tokens."""
    prompts, ucm, options = make_prompts(name), case.ucm, sizes(name)
    with Engine(model, ucm, kv_cache_dtype="fp8", **options) as engine:
        warm = compilations(engine)
        found = engine.greedy(prompts, case.length)
        assert_none_compiled(engine, warm)
    with rounding_engine(model, ucm=ucm, **options) as engine:
        expected = engine.greedy(prompts, case.length)
    off = [index for index, pair in enumerate(zip(found, expected, strict=True)) if is_off(*pair)]
    said = f"{len(found) - len(off)} of {len(found)} answers equal those of rounded rows"
    if not off:
        return said
    # a number in the middle of two 8-bit floats may have been rounded the other way: then all are when that is followed
    others = assert_follows(model, prompts, case.length, **options)
    for index in off:
        assert found[index].tokens == expected[index].tokens, f"answer {index} has other tokens than rounded rows give"
        pairs = zip(found[index].logprobs, expected[index].logprobs, strict=True)
        most = max(abs(one - other) for one, other in pairs)
        assert most <= ROUNDED, f"answer {index} is off by {most:.1e}, expected at most {ROUNDED:.0e}"
    assert others, f"answers {off} are not those of rounded rows, and no number was rounded the other way"
    return f"{said}; all do with {others} numbers rounded the other way, in the middle of two 8-bit floats"


def compilations(engine: Engine) -> list[int]:
    """Returns how many recipes each worker's card has compiled; nothing on devices that do not count them."""
    if os.environ.get("VLLM_GAUDI_UCM_DEVICE") != "hpu":
        return []
    if isinstance(engine, EngineOfWorkers):
        return engine.on_workers(count_compilations)
    return [get_device("hpu").compilations()]


def assert_none_compiled(engine: Engine, warm: list[int]) -> None:
    """Compares the counts with those after the warm-up."""
    now = compilations(engine)
    assert now == warm, (
        f"recipes compiled after the warm-up: {[one - other for one, other in zip(now, warm, strict=True)]}"
    )


def is_off(one: Answer, other: Answer) -> bool:
    """True if an answer differs as it may if a number midway between two 8-bit floats is rounded the other way."""
    try:
        assert_same([one], [other])
    except AssertionError:
        return True
    return False


def cases(name: str, asked: argparse.Namespace) -> Iterator[Case]:
    """Yields the requested cases that are not refused for the family."""
    kept = KEPT if name in STATES else {}
    yield from (case._replace(ucm={**kept, **case.ucm}, scheme=asked.quantised) for case in requested(name, asked))


def requested(name: str, asked: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases that the arguments name."""
    ranks, stages = asked.tensor_parallel, asked.stages
    if asked.engines > 1:
        yield Case(f"{asked.engines} engines", FEW_GRAPHS, {}, SHORT)
        return
    if ranks > 1 or stages > 1:
        workers = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        ours = {**FEW_GRAPHS, "distributed": {"check_ranks": True}}
        yield Case(f"{ranks} ranks, {stages} stages", ours, workers, SHORT)
        return
    for case in every_case(name):
        if case.what in asked.features if asked.features else asked.more or case.what in ONE_DEVICE:
            yield case if asked.quantised is None else case._replace(ucm={**FEW_GRAPHS, **case.ucm}, length=SHORT)


def every_case(name: str) -> Iterator[Case]:
    """Yields every case of one worker."""
    yield Case("dense", {}, {})
    yield Case("true shapes", {"graphs": {"mode": "off"}}, {})
    swap = {"preemption": {"mode": "swap", "host_memory": 4 << 20}}
    yield Case("drafts and swaps", {**FEW_GRAPHS, **swap}, {"speculative_config": DRAFTS})
    if name not in STATES:
        yield Case("stores", FEW_GRAPHS, {}, SHORT)
    yield Case("8-bit cache", FEW_GRAPHS, {}, SHORT)
    if name not in (IN_ALL_LAYERS, "bloom"):
        chosen = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}
        yield Case("all blocks chosen", chosen, {})
    if name not in (*WINDOWS, *SHARED_KEYS, *STATES, IN_ALL_LAYERS, OWN_KEYS, "bloom"):
        # refused with a number of blocks
        yield Case("slots for tokens", {"kv_cache": {"granularity": "token"}}, {"num_gpu_blocks_override": None})


def check(name: str, model: Path, case: Case, engines: int) -> str:
    """Checks a family, and describes what has run."""
    if case.what == "8-bit cache":
        return serve_narrow(name, model, case)
    files = written(name, model, case.scheme)
    if engines > 1:
        return serve_divided(name, *files, case, engines)
    run = serve_stored if case.what == "stores" else serve
    if case.scheme and name == "gpt_oss":
        # no row is rounded
        return f"{run(name, *files, case._replace(scheme=None))}, experts in MXFP4, the one format for them"
    return run(name, *files, case)


def written(name: str, model: Path, scheme: str | None) -> tuple[Path, Path]:
    """Writes the model to serve, and the one for Transformers.

    Raises ValueError if no weight is quantised, because the writer does not know the names of layers.
    """
    if scheme is None:
        return model, model
    if name == "gpt_oss":
        return write_gpt_oss(model, model / "quantised")
    config, choose = compressed_tensors({LINEAR: scheme})
    quantised, meant = write_quantised(model, model / "quantised", config, choose)
    if (quantised / "model.safetensors").stat().st_size >= (meant / "model.safetensors").stat().st_size:
        raise ValueError("no weight of it was quantised")
    return quantised, meant


def main(argv: list[str] | None = None) -> int:
    """Checks each family; returns the exit status, which tells whether all were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", help="of them; all by default")
    parser.add_argument("--more", action="store_true", help="also with the features that a family has")
    parser.add_argument("--features", nargs="+", metavar="NAME", help="of those of --more, by name")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of each engine")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="stages of each engine's pipeline")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="engines that share out the requests")
    # rows of 8-bit integers are rounded on some devices, and Transformers' are not
    exact = [name for name in SCHEMES if not name.startswith("int8")]
    parser.add_argument("--quantised", choices=exact, help="serves checkpoints of this scheme")
    options = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, write in families(options.stages):
            if options.families and name not in options.families:
                continue
            model = write(Path(folder) / name.replace(", ", "-"))
            for case in cases(name, options):
                begin = time.perf_counter()
                try:
                    said = check(name, model, case, options.engines)
                except Exception as error:  # the next one may be right
                    wrong += 1
                    said = f"WRONG: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
                what = f"{case.what}, {options.quantised}" if options.quantised else case.what
                print(f"{name}, {what}: {said} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
