"""Models with a state in some layers give the tokens of Transformers."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.hybrids import HYBRIDS, hybrid_config, hybrid_prompts, make_hybrid, watch_experts
from tests.engine.quantised_models import fp8_tensor, write_quantised
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.swap import Poisoned, preemption
from tests.engine.tensor_parallel import CHECKED
from tests.engine.tiny_models import make_model
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer

pytestmark = pytest.mark.slow  # starts engines

LENGTH = 64
# prompts come in chunks of any length
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256}
# room for few requests
FEW_BLOCKS = {"num_gpu_blocks_override": 24}
BUCKETS = {"graphs": {"mode": "eager", "max_graphs": 6}}
# vLLM's flag alone is not enough on a CPU
AHEAD = {"scheduler": {"async_scheduling": True}}
# one of each kind of layer; other families have the same layers between other parts
ONE_OF_EACH = ["granitemoehybrid", "lfm2", "qwen3_next"]
OTHERS = sorted(set(HYBRIDS) - {*ONE_OF_EACH, "zamba2"})  # whose heads are wide, so it takes long
of_each_kind = pytest.mark.parametrize("model", ONE_OF_EACH, indirect=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# of two float32 sums in different orders, by far
NEAR_EXPERTS = 5e-5
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrids"), request.param)


@pytest.fixture(scope="module")
def served(model: Path) -> list[Answer]:
    with Engine(model, **OPTIONS) as engine:
        answers = engine.greedy(hybrid_prompts(), LENGTH)
        engine.check_idle()
        again = engine.greedy(hybrid_prompts()[-1:], 8)
    assert again[0].cached_tokens == 0
    return answers


def test_greedy_tokens_are_those_of_transformers(model: Path, served: list[Answer]) -> None:
    reference = ReferenceModel(model)
    gaps = watch_experts(reference.model)
    reference.assert_greedy(hybrid_prompts(), served)
    assert not gaps or torch.cat(gaps).min() > NEAR_EXPERTS


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@of_each_kind
def test_a_preempted_request_begins_again(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(model, ucm, **OPTIONS, **FEW_BLOCKS) as engine:
        found = engine.greedy(hybrid_prompts(), LENGTH)
        assert engine.preemptions > 0
        engine.check_idle()
    assert_same(found, served)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@of_each_kind
def test_rejected_drafts_are_rolled_back(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(model, ucm, **OPTIONS, speculative_config=NGRAM) as engine:
        found = engine.greedy(hybrid_prompts(), LENGTH)
    assert_same(found, served)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@of_each_kind
def test_the_next_step_is_planned_while_one_runs(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(model, {**ucm, **AHEAD}, **OPTIONS) as engine:
        assert engine.core.batch_queue_size == 2
        assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)


@of_each_kind
def test_a_sparse_method_chooses_in_the_layers_with_attention(model: Path, served: list[Answer]) -> None:
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}
    with Engine(model, ucm, **OPTIONS) as engine:
        assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@of_each_kind
def test_kept_states_make_prefix_caching(model: Path, served: list[Answer], ucm: dict[str, Any]) -> None:
    """A hit ends at a block behind which a state is kept; with few of them, the ones used last are kept."""
    prompts = hybrid_prompts()
    with Engine(model, {**ucm, "kv_cache": {"kept_states": 8}}, **OPTIONS, enable_prefix_caching=True) as engine:
        assert_same(engine.greedy(prompts, LENGTH), served)
        # in chunks of 48 tokens
        again = [engine.greedy(prompts[-1:], LENGTH)[0] for _ in range(2)]
        assert again[1].cached_tokens == 144
        assert_same(again, [served[-1]] * 2)
        # a second turn begins behind the last block that the first answer has filled
        asked, answer = prompts[-1], served[-1].tokens
        (turn,) = engine.greedy([[*asked, *answer[:60]]], LENGTH - 60)
        assert turn.cached_tokens == (len(asked) + 60 - 1) // 16 * 16 > len(asked)
        assert turn.tokens == answer[60:]
        assert_same(engine.greedy(prompts, LENGTH), served)
        assert engine.core.scheduler.reset_prefix_cache()
        assert engine.greedy(prompts[-1:], LENGTH)[0].cached_tokens == 0
        engine.check_idle()


@of_each_kind
def test_kept_states_of_preempted_requests_with_drafts(model: Path, served: list[Answer]) -> None:
    options = {**OPTIONS, **FEW_BLOCKS, "enable_prefix_caching": True, "speculative_config": NGRAM}
    with Engine(model, {"kv_cache": {"kept_states": 4}}, **options) as engine:
        for _ in range(2):
            assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)
        assert engine.preemptions > 0
        (turn,) = engine.greedy([[*hybrid_prompts()[-1], *served[-1].tokens[:60]]], 4)
        assert turn.tokens == served[-1].tokens[60:]


@pytest.mark.parametrize("model", OTHERS, indirect=True)
def test_all_together(model: Path, served: list[Answer]) -> None:
    """Families with layers of a kind that the other tests serve: buckets, drafts, kept states, preemptions, and a
    sparse method.
    """
    ucm = {**BUCKETS, "ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": ALL_BLOCKS}}
    options = {**OPTIONS, **FEW_BLOCKS, "enable_prefix_caching": True, "speculative_config": NGRAM}
    with Engine(model, {**ucm, "kv_cache": {"kept_states": 4}}, **options) as engine:
        for _ in range(2):
            assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)
        assert engine.preemptions > 0
        (turn,) = engine.greedy([[*hybrid_prompts()[-1], *served[-1].tokens[:60]]], 4)
        assert turn.cached_tokens > len(hybrid_prompts()[-1])
        assert turn.tokens == served[-1].tokens[60:]


SWAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "true shapes": ({}, {}),
    "drafts in buckets": (BUCKETS, {"speculative_config": NGRAM}),
    "ahead, with kept states": ({**AHEAD, "kv_cache": {"kept_states": 4}}, {"enable_prefix_caching": True}),
}


@pytest.mark.parametrize("kind", SWAPS)
@of_each_kind
def test_states_are_swapped_with_blocks(model: Path, served: list[Answer], kind: str) -> None:
    """A preempted request goes on from its states, whatever of its drafts was rejected. covers: A7"""
    ucm, options = SWAPS[kind]
    with Poisoned(model, {**ucm, **preemption("swap")}, **OPTIONS, **FEW_BLOCKS, **options) as engine:
        if "ahead" in kind:
            assert engine.core.batch_queue_size == 2
        assert_same(engine.staggered(hybrid_prompts(), range(len(served)), LENGTH), served)
        assert engine.preemptions > 0
        assert engine.totals.swapped_in > 2
        assert engine.totals.recomputed_tokens == 0
        assert engine.swaps is not None
        assert engine.swaps.cost.rates.are_known
        engine.check_all_free()


@pytest.mark.parametrize("model", [*ONE_OF_EACH, "falcon_h1", "nemotron_h", "qwen3_5_text"], indirect=True)
def test_two_workers_share_the_layers(model: Path, served: list[Answer]) -> None:
    """Each swaps its part of the states of preempted requests."""
    ucm = {**CHECKED, **preemption("swap")}
    with EngineOfWorkers(model, ucm, **OPTIONS, **FEW_BLOCKS, tensor_parallel_size=2) as engine:
        assert_same(engine.greedy(hybrid_prompts(), LENGTH), served)
        totals = engine.core.scheduler.block_policies.totals
        assert engine.preemptions > 0
        assert totals.swapped_in > 2
        assert totals.recomputed_tokens == 0
        engine.check_idle()


def test_states_are_given_back_while_the_engine_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights are refused while there are states, and taken while the engine sleeps."""
    # a GPU is tried here before a user's engine sleeps on one
    monkeypatch.setattr("vllm_gaudi_ucm.platform.reload.SLEPT_ON_A_GPU", True)
    model = make_hybrid(tmp_path, "lfm2")
    other = make_model(tmp_path / "other", hybrid_config("lfm2"), seed=5)
    weights = {"weights_path": str(other)}
    with Engine(model, **OPTIONS) as engine:
        before = engine.greedy(hybrid_prompts(), 8)
        with pytest.raises(UnsupportedCallError, match=r"layers that keep a state.*call sleep before it"):
            engine.llm.collective_rpc("reload_weights", kwargs=weights)
        for level in (1, 2):
            layers = [one for one in engine.runner.decoder.model.modules() if isinstance(one, StateLayer)]
            states = [weakref.ref(one) for layer in layers for one in layer.kv_cache]
            del layers
            engine.llm.sleep(level)
            assert [state() for state in states] == [None, None]
            engine.llm.wake_up()
            assert_same(engine.greedy(hybrid_prompts(), 8), before)
        engine.step()
        # slots of requests that have ended are free again
        assert [len(planner._slots) for planner in engine.runner.parts.steps._planner._others] == [0]
        engine.llm.sleep(1)
        engine.llm.collective_rpc("reload_weights", kwargs=weights)
        engine.llm.wake_up()
        ReferenceModel(other).assert_greedy(hybrid_prompts(), engine.greedy(hybrid_prompts(), 8))


def test_two_stages_have_states_of_their_own(tmp_path: Path) -> None:
    """Each stage has layers of both kinds."""
    kinds = ["conv", "full_attention"] * 2
    model = make_hybrid(tmp_path, "lfm2", num_hidden_layers=4, layer_types=kinds)
    with EngineOfWorkers(model, **OPTIONS, pipeline_parallel_size=2) as engine:
        answers = engine.greedy(hybrid_prompts(), LENGTH)
        engine.check_idle()
    ReferenceModel(model).assert_greedy(hybrid_prompts(), answers)


@pytest.mark.parametrize("model", ["falcon_h1", "lfm2", "qwen3_5_text"], indirect=True)
def test_quantised_weights(model: Path, tmp_path: Path) -> None:
    """All linear layers; a projection of a mixer has matrices with a scale each."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantised, meant = write_quantised(model, tmp_path, config, lambda _: fp8_tensor())
    with Engine(quantised, BUCKETS, **OPTIONS) as engine:
        ReferenceModel(meant).assert_greedy(hybrid_prompts(), engine.greedy(hybrid_prompts(), 24))


ON_CARD: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "num_gpu_blocks_override": 15,
}
CARD_PROMPTS = [prompt[:100] for prompt in hybrid_prompts()[::2]]


def serve_all(models: dict[str, str], prompts: list[list[int]]) -> dict[str, Any]:
    """On the card, one engine after the other: the answers of each family, and the graphs that these have compiled."""
    from habana_frameworks.torch.simulator import card

    found = {}
    for name, model in models.items():
        kept = {"kv_cache": {"kept_states": 4}}
        ucm = {"graphs": {"warm_up": "full", "max_graphs": 2}, **preemption("swap"), **kept}
        with Engine(Path(model), ucm, **ON_CARD, enable_prefix_caching=True) as engine:
            before = card.compilations
            # one of them fills a block, behind which its state is kept
            answers = engine.greedy(prompts, 14)
            assert engine.greedy(prompts[-1:], 1)[0].cached_tokens
            compiled, totals = card.compilations - before, engine.core.scheduler.block_policies.totals
            found[name] = [[dataclasses.asdict(answer) for answer in answers], compiled, totals.swapped_in]
    return {"families": found, "broken": broken_duties()}


def test_on_the_simulated_card(tmp_path: Path) -> None:
    """Through torch.compile, the default there: once warm nothing is compiled, chunks and swapped and kept states
    included.
    """
    models = {name: str(make_hybrid(tmp_path, name)) for name in ("lfm2", "granitemoehybrid", "qwen3_next")}
    found = run_on_card(serve_all, tmp_path, models=models, prompts=CARD_PROMPTS).result
    for name, (answers, compiled, swapped_in) in found["families"].items():
        ReferenceModel(Path(models[name])).assert_greedy(CARD_PROMPTS, [Answer(**answer) for answer in answers])
        assert compiled == 0
        assert swapped_in
    # a layer reads states that it writes: the bridge then copies them all
    assert set(found["broken"]) == {"12 aten.index_copy.default"}


CONNECTOR = {
    "kv_connector": "UcmConnector",
    "kv_connector_module_path": "vllm_gaudi_ucm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"store": {"kind": "memory", "capacity": 1 << 20}},
}
OFFLOADING = {"kv_offloading_size": 1.0, "kv_offloading_backend": "native"}
MEMORY_MODE = {"ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}}
# what to use instead, and what has asked for it
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("leave the option out.*ucm.kv_cache.granularity", {"kv_cache": {"granularity": "token"}}, {}),
    ("leave the option out.*ucm.kv_cache.compaction", {"kv_cache": {"compaction": True}}, {}),
    ("take ucm.kv_cache.kept_states.*--kv-transfer-config", {}, {"kv_transfer_config": CONNECTOR}),
    ("take ucm.kv_cache.kept_states.*--kv-transfer-config", {}, OFFLOADING),
    ("ucm.preemption.mode swap.*ucm.memory_mode", MEMORY_MODE, {}),
]


@pytest.mark.parametrize(("words", "ucm", "options"), REFUSED, ids=["slots", "compaction", "ours", "vLLM's", "memory"])
def test_what_moves_or_divides_blocks_is_refused(
    tmp_path: Path, words: str, ucm: dict[str, Any], options: dict[str, Any]
) -> None:
    model = make_hybrid(tmp_path, "lfm2")
    with pytest.raises(UnsupportedFeatureError, match=f"layers that keep a state.*{words}"):
        Engine(model, ucm, **OPTIONS, **options).__enter__()


def test_a_draft_model_reads_the_same_blocks(tmp_path: Path, tiny_llama: Path) -> None:
    """Layers with attention draft for layers with a state; a draft model with states is refused."""
    model = make_hybrid(tmp_path, "lfm2")
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    for ucm in ({}, {**BUCKETS, **AHEAD}):
        with Engine(model, ucm, **OPTIONS, **FEW_BLOCKS, speculative_config=drafts) as engine:
            ReferenceModel(model).assert_greedy(hybrid_prompts(), engine.greedy(hybrid_prompts(), 32))
            assert engine.preemptions > 0
            engine.step()
            engine.check_idle()
    own = {**drafts, "model": str(model)}
    with pytest.raises(UnsupportedFeatureError, match=r"take n-grams.*--speculative-config \(a draft model with such"):
        Engine(model, **OPTIONS, speculative_config=own).__enter__()
