"""Adapters (LoRA) with other features: several workers, sparse methods, quantised weights, experts, families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import ALL_LINEAR, EMBEDDINGS, add_matrices, make_adapter, merge_adapter, request_of
from tests.engine.hybrids import hybrid_config
from tests.engine.lora_family import BUCKETS, OPTIONS, PROMPTS, Family
from tests.engine.lora_requests import ask
from tests.engine.quantised_models import compressed_tensors, write_quantised
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.sparse import STATIC
from tests.engine.tensor_parallel import CHECKED
from tests.engine.tiny_models import make_config, make_model
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm.lora.adapter_check import AdapterError
from vllm_gaudi_ucm_tools.buckets.held_weights import adapter_bytes

pytestmark = pytest.mark.slow  # starts engines


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"])
def test_two_workers(llama: Family, ucm: dict[str, Any], sizes: dict[str, int]) -> None:
    config = {**ucm, **CHECKED} if "tensor_parallel_size" in sizes else ucm
    with EngineOfWorkers(llama.model, config, **OPTIONS, **sizes) as engine:
        llama.ask(engine)
        # every worker refuses what does not fit, and goes on
        bad = make_adapter(llama.model.parent / "bad", llama.model, rank=16)
        with pytest.raises(Exception, match="rank 16 is greater than"):
            engine.llm.llm_engine.add_lora(request_of(bad, 9))
        llama.ask(engine, PROMPTS[-1:])


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "buckets"])
def test_a_sparse_method_with_a_budget_of_all_blocks(llama: Family, method: str, static: bool) -> None:
    options = {"sparse_steps": "always", "min_tokens": 32, "sparse_ratio": 1.0, "min_blocks": 2}
    ucm: dict[str, Any] = {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}}
    with Engine(llama.model, {**ucm, "graphs": STATIC} if static else ucm, **OPTIONS) as engine:
        llama.ask(engine)


@pytest.mark.parametrize("model_type", ["qwen2", "opt", "gpt2"])
def test_families(model_type: str, tmp_path: Path) -> None:
    """Tied embeddings; layers whose names are in no other family, and one product for query, key and value."""
    modules = {"qwen2": (*ALL_LINEAR, *EMBEDDINGS), "opt": ("q_proj", "v_proj", "out_proj", "fc1", "fc2")}
    if model_type == "gpt2":
        with pytest.raises(ValueError, match="LoRA is not supported"):
            Engine(make_model(tmp_path / "gpt2", make_config("gpt2")), {}, **OPTIONS)
        return
    family = Family(tmp_path, model_type, modules[model_type])
    for ucm in ({}, BUCKETS):
        with Engine(family.model, ucm, **OPTIONS) as engine:
            family.ask(engine)


def test_attention_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """Experts take no adapters, by name; everything else does."""
    family = Family(tmp_path, "qwen3_moe", ALL_LINEAR[:4])
    with Engine(family.model, {}, **OPTIONS) as engine:
        family.ask(engine)
        bad = make_adapter(tmp_path / "experts", family.model, modules=["q_proj"])
        add_matrices(bad, "model.layers.0.mlp.experts.0.gate_proj", 64, 32)
        with pytest.raises(AdapterError, match="experts"):
            engine.llm.llm_engine.add_lora(request_of(bad, 9))
        family.ask(engine, PROMPTS[-1:])


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_layers_that_keep_a_state(tmp_path: Path, kind: str) -> None:
    """Their linear layers take adapters, and their convolutions do not, by name."""
    modules = {
        "lfm2": ("q_proj", "in_proj", "out_proj"),
        "qwen3_next": ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    }
    family = Family(tmp_path, hybrid_config(kind), modules[kind])
    with Engine(family.model, {}, **OPTIONS) as engine:
        family.ask(engine)
        if kind == "lfm2":
            bad = make_adapter(tmp_path / "convolution", family.model, modules=["q_proj"])
            add_matrices(bad, "model.layers.0.conv.conv", 3, 64)
            with pytest.raises(AdapterError, match="a convolution"):
                engine.llm.llm_engine.add_lora(request_of(bad, 9))
        family.ask(engine, PROMPTS[-1:])


def test_quantised_weights(tmp_path: Path) -> None:
    """The adapter is added to the exact product of the codes."""
    plain = make_model(tmp_path / "plain", make_config("llama"))
    choice = compressed_tensors({r".*_proj": "fp8 per channel"})
    quantised, exact = write_quantised(plain, tmp_path / "quantised", *choice)
    adapter = make_adapter(tmp_path / "adapter", plain, seed=1)
    reference = ReferenceModel(merge_adapter(tmp_path / "merged", exact, adapter))
    with Engine(quantised, {}, **OPTIONS) as engine:
        answers = ask(engine, [(prompt, request_of(adapter, 1)) for prompt in PROMPTS], 8)
    reference.assert_greedy(PROMPTS, answers)


def test_target_modules_of_the_engine(llama: Family) -> None:
    """Layers that are left out have no slots, and an adapter with matrices for one is refused."""
    sizes: list[int] = []
    for target in (None, ["q_proj", "k_proj", "v_proj"]):
        with Engine(llama.model, {}, **{**OPTIONS, "lora_target_modules": target}) as engine:
            assert engine.runner.adapters is not None
            sizes.append(engine.runner.adapters.nbytes)
            if target is not None:
                with pytest.raises(AdapterError, match="lora-target-modules leaves out"):
                    engine.llm.llm_engine.add_lora(llama.requests[1])
    assert sizes[0] > sizes[1]
    spec = ModelSpec.from_hf_config({**make_config("llama").to_dict(), "dtype": "float32"})
    assert adapter_bytes(spec, 2, 8) == sizes[0]
