"""Stages of a pipeline, each in a process of its own: the tokens of one worker that has all layers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.contracts import CONTRACTS, runner_contract
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.tiny_models import make_config, make_model
from tests.engine.worker_processes import EngineOfWorkers

pytestmark = pytest.mark.slow  # starts engines of several processes

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "structured_outputs_config": {"backend": "xgrammar"},
}
# blocks of the longest request and a few more: others are preempted
TIGHT = {"num_gpu_blocks_override": 20, "max_model_len": 256}
# room for some of their blocks in host memory: others are computed again
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
ON_PIPELINE = {
    "kv_cache": {"partial_hits": True, "compaction": True},
    "preemption": {"mode": "swap", "host_memory": 10 * BLOCK_BYTES},
}
OUTPUTS = 40


def _prompts(seed: int, count: int) -> list[list[int]]:
    """Longer than a step, some with a beginning in common."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 200) for _ in range(70)]
    return [
        common[: 35 * (index % 3)] + [rng.randrange(3, 200) for _ in range(rng.randrange(1, 120))]
        for index in range(count)
    ]


PROMPTS = _prompts(1, 8)
# they begin together, and none of them fits beside all others in the end
GROWING = [prompt[-20:] for prompt in _prompts(2, 10)]
GROWN = 80
SAMPLED = [
    SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, top_k=20, max_tokens=12, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    SamplingParams(temperature=1.0, seed=9, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r"\d{4}")),
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0),
]


def _sampled(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Tokens of `SAMPLED`, and the scores of a prompt where they are wanted."""
    outputs = engine.generate(PROMPTS[: len(SAMPLED)], SAMPLED)
    return [
        (
            list(output.outputs[0].token_ids),
            [next(iter(scores.values())).logprob for scores in output.prompt_logprobs or () if scores],
        )
        for output in outputs
    ]


class Expected(NamedTuple):
    """Of one worker."""

    alone: list[Answer]
    sampled: list[tuple[list[int], list[float]]]
    grown: list[Answer]


@pytest.fixture(scope="module")
def expected(tiny_text_model: Path) -> Expected:
    with Engine(tiny_text_model, **OPTIONS) as engine:
        return Expected(engine.alone(PROMPTS, OUTPUTS), _sampled(engine), engine.greedy(GROWING, GROWN))


@pytest.fixture(scope="module", params=CONTRACTS)
def pipeline(tiny_text_model: Path, request: pytest.FixtureRequest) -> Iterator[EngineOfWorkers]:
    options = {**OPTIONS, **TIGHT, "pipeline_parallel_size": 2}
    with runner_contract(request.param), EngineOfWorkers(tiny_text_model, ON_PIPELINE, **options) as engine:
        yield engine


def test_each_stage_has_its_layers(pipeline: EngineOfWorkers) -> None:
    assert pipeline.on_workers(_layers) == [["model.layers.0.self_attn.attn"], ["model.layers.1.self_attn.attn"]]


def _layers(worker: Any) -> list[str]:
    return list(worker.model_runner.parts.kv_caches)


def test_chunks_preemptions_and_hits(pipeline: EngineOfWorkers, expected: Expected) -> None:
    """Requests of two batches in flight, whose tokens the first stage is told a step later."""
    for _ in range(2):
        assert_same(pipeline.greedy(PROMPTS, OUTPUTS), expected.alone)
    assert pipeline.most_in_flight == 2
    assert pipeline.preemptions > 0
    again = pipeline.greedy([PROMPTS[2]], OUTPUTS)
    assert_same(again, [expected.alone[2]])
    assert again[0].cached_tokens > 0
    pipeline.step()
    pipeline.check_idle()


def test_swaps_while_steps_are_in_flight(pipeline: EngineOfWorkers, expected: Expected) -> None:
    """Each stage copies blocks of its layers when it comes to the step; where host memory is full, requests are
    computed again."""
    assert_same(pipeline.greedy(GROWING, GROWN), expected.grown)
    rules = pipeline.core.scheduler.block_policies
    assert rules.named("swap")._slots.count == 10
    assert rules.totals.swapped_in > 20
    assert 0 < rules.totals.swap_refusals < pipeline.preemptions
    assert rules.totals.recomputed_tokens > 0
    assert rules.named("swap").cost.rates.are_known
    rules.named("swap").check_integrity()


def test_aborts(pipeline: EngineOfWorkers, expected: Expected) -> None:
    """While their steps are in flight, too; the others' tokens do not change."""
    rng = random.Random(8)
    kept = {pipeline.new_id(): index for index in range(len(PROMPTS))}
    waiting, live, found = list(kept), [], {}
    engine = pipeline.llm.llm_engine
    for step in range(400):
        if step % 6 == 0 and waiting:
            name = waiting.pop(0)
            pipeline.add(name, PROMPTS[kept[name]], greedy_params(OUTPUTS))
        if rng.random() < 0.4 and step < 120:
            live.append(pipeline.new_id())
            pipeline.add(live[-1], _prompts(step, 1)[0], greedy_params(60))
        if live and (rng.random() < 0.4 or step > 120):
            engine.abort_request([live.pop(rng.randrange(len(live)))], internal=False)
        for output in pipeline.step():
            if output.finished and output.request_id in kept:
                found[kept[output.request_id]] = answer_of(output)
        if not waiting and not live and not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    pipeline.step()
    pipeline.check_idle()
    assert_same([found[index] for index in range(len(PROMPTS))], expected.alone)


def test_sampling_and_scores(pipeline: EngineOfWorkers, expected: Expected) -> None:
    """Seeds, penalties, grammars and scores of prompts, which the last stage alone computes."""
    for (tokens, scores), (tokens_wanted, scores_wanted) in zip(_sampled(pipeline), expected.sampled, strict=True):
        assert tokens == tokens_wanted
        assert scores == pytest.approx(scores_wanted, abs=1e-3)


SELECTS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2, "sparse_ratio": 0.4}
CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}


def test_each_stage_chooses_for_its_layers(tmp_path: Path, in_process: None) -> None:
    """Three layers on two stages: one that chooses and one that follows it, and one that is dense. Then requests are
    swapped while their steps are in flight, and all stages choose among the same blocks again."""
    model = make_model(tmp_path / "model", make_config("llama", num_hidden_layers=3))
    options = {**SELECTS, "reuse_layers": 2, "dense_layers": [2]}
    gsa = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}}
    small: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 6}
    with Engine(model, gsa, **small) as engine:
        expected = engine.greedy(PROMPTS[:2], OUTPUTS)
    swap = {**gsa, **CHECKED, "preemption": {"mode": "swap"}}
    with EngineOfWorkers(model, swap, pipeline_parallel_size=2, **small, **TIGHT) as engine:
        assert_same(engine.greedy(PROMPTS[:2], OUTPUTS), expected)
        assert engine.on_workers(_choices) == [([0, 0], 0), ([None], 2)]
        assert engine.preemptions == 0
        rules = engine.core.scheduler.block_policies
        # 4 GiB of both stages, one of two layers and one of one
        assert rules.named("swap")._slots.count == (4 << 30) // (3 * BLOCK_BYTES // 2)
        engine.greedy(GROWING, GROWN)
        assert engine.most_in_flight == 2
        assert engine.preemptions > 5
        assert rules.totals.swapped_in > 10
        assert rules.totals.recomputed_tokens == 0
        rules.named("swap").check_integrity()
        first, last = engine.on_workers(_selected)
        assert first == last
        assert first["modes"]["SELECT"] > 100


def _selected(worker: Any) -> dict[str, Any]:
    """How many requests have chosen blocks, and among how many."""
    totals = worker.model_runner.parts.sparse.state.totals
    return {**vars(totals), "modes": {mode.name: count for mode, count in totals.modes.items()}}


def _choices(worker: Any) -> tuple[list[int | None], int]:
    """Which of a worker's layers chooses for each of them, and the first layer's place in the model."""
    parts = worker.model_runner.parts
    return parts.sparse.selector.leaders, int(next(iter(parts.kv_caches)).split(".")[2])


@pytest.mark.timeout(600)  # starts five processes
def test_tensor_parallel_stages(tmp_path: Path, in_process: None) -> None:
    """TP 2 x PP 2, in buckets, sparse under locks: the ranks of a stage average its scores, and no others."""
    model = make_model(tmp_path / "model", make_config("llama", num_hidden_layers=4))
    options = {**SELECTS, "checkpoint_interval": 3, "lock_duration": 9, "summary": "minmax", "dense_layers": [3]}
    kvstar = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": options}}
    with Engine(model, kvstar) as engine:
        expected = engine.greedy(PROMPTS[:4], 24)
    graphs = {"graphs": {"mode": "eager", "warm_up": "full", "max_graphs": 6}, **CHECKED, **kvstar}
    with EngineOfWorkers(model, graphs, tensor_parallel_size=2, pipeline_parallel_size=2) as engine:
        assert_same(engine.greedy(PROMPTS[:4], 24), expected)
        assert engine.on_workers(_place) == [(True, False), (True, False), (False, True), (False, True)]


def _place(worker: Any) -> tuple[bool, bool]:
    stage = worker.model_runner.decoder.stage
    return stage.is_first, stage.is_last


# of any other length, a prompt that is found in the cache up to its last token would choose for its first one
DENSE_AT_FIRST = [prompt for prompt in PROMPTS if len(prompt) % 32 != 1]
ESA = {"ucm_sparse_method": "ESA", "ucm_sparse_config": {"ESA": SELECTS}}
ON_CARD = {"max_num_batched_tokens": 128, "max_num_seqs": 6, "max_model_len": 256, "block_size": 32}


def serve_on_cards(model: str) -> dict[str, Any]:
    """Answers of two rounds, and what each card has compiled before and after them."""
    graphs = {"graphs": {"warm_up": "full", "max_graphs": 3}, **ESA}
    with EngineOfWorkers(Path(model), graphs, pipeline_parallel_size=2, **ON_CARD) as engine:
        before = engine.on_workers(compiled)
        rounds = [[answer.__dict__ for answer in engine.greedy(DENSE_AT_FIRST, 8)] for _ in range(2)]
        found = {"rounds": rounds, "before": before, "after": engine.on_workers(compiled)}
        return {**found, "selected": engine.on_workers(_selected)}


def compiled(worker: Any) -> dict[str, Any]:
    """Of a worker's card."""
    from habana_frameworks.torch.simulator import card

    return {"graphs": card.compiled_graphs, "recipes": [key for key, _ in card.recipes], "bypasses": card.bypasses}


@pytest.mark.timeout(700)  # three processes that compile
def test_stages_on_cards_compile_nothing_once_warm(tiny_llama: Path, tmp_path: Path) -> None:
    """Compile mode, the default of a Gaudi."""
    with Engine(tiny_llama, ESA, **ON_CARD) as engine:
        expected = engine.greedy(DENSE_AT_FIRST, 8)
    finished = run_on_card(serve_on_cards, tmp_path, seconds=600, model=str(tiny_llama))
    found = finished.result
    for answers in found["rounds"]:
        assert_same([Answer(**answer) for answer in answers], expected)
    assert all(count["graphs"] > 0 for count in found["before"])
    assert found["after"] == found["before"]
    assert found["selected"][0] == found["selected"][1]
    assert found["selected"][0]["modes"]["SELECT"] > 20
    assert "1 layers of LlamaForCausalLM are one compiled region" in finished.log
