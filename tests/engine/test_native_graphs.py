"""Small steps on a CPU as graphs of native calls: the same bits as without, for whatever comes between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import rotary_embedding

from tests.engine.head_models import make_pair
from tests.engine.serving import Answer, Engine, greedy_params
from tests.engine.tiny_models import FAMILIES, LATENT, MIXTURES, VOCAB, make_config, make_model
from vllm_gaudi_ucm.execution.cpu.native_graphs import MOST_ROWS, NativeGraphs
from vllm_gaudi_ucm.ops.cpu.native import library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library.native() is None, reason=library.why_not_native())]
WAYS = ("replayed", "captured", "ordinary")
OFF: dict[str, Any] = {"cpu": {"native_graphs": False}}
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(RNG.choice([1, 2, 15, 16, 40, 70]))] for _ in range(12)]
ARRIVALS = [RNG.randrange(12) for _ in PROMPTS]


@pytest.fixture(autouse=True)
def own_rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM shares these among the engines of a process, and changes their dtype for a model in half precision."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def graphs_of(engine: Engine) -> NativeGraphs | None:
    execution: Any = engine.runner.parts.steps.execution
    return execution._graphs  # type: ignore[no-any-return]


def counts(engine: Engine) -> dict[str, int]:
    """Forward passes by how they ran."""
    graphs = graphs_of(engine)
    found = {} if graphs is None else {way: getattr(graphs._metrics, f"_{way}") for way in WAYS}
    return {way: int(series._cells[series._index]) for way, series in found.items()}


def replays(graphs: NativeGraphs) -> int:
    series = graphs._metrics._replayed
    return int(series._cells[series._index])


def served(model: Path, ucm: dict[str, Any], rounds: int = 2, **options: Any) -> tuple[list[Answer], dict[str, int]]:
    """Random arrivals, with chunked prompts beside decodes and preemptions, in another order the second time."""
    with Engine(model, ucm, max_num_seqs=6, max_num_batched_tokens=48, **options) as engine:
        orders = (ARRIVALS, ARRIVALS[::-1])[:rounds]
        answers = [answer for arrivals in orders for answer in engine.staggered(PROMPTS, arrivals, 30)]
        engine.check_idle()
        assert (graphs_of(engine) is None) == (ucm == OFF)
        return answers, counts(engine)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - LATENT))
def test_graphs_change_no_bit(family: str, tmp_path: Path) -> None:
    """Logprobs are compared as they are. Models whose layers are not native kernels throughout run the ordinary way;
    latent attention is not asked for graphs."""
    model = make_model(tmp_path, make_config(family))
    options = {"num_gpu_blocks_override": 24, "max_model_len": 256}
    # their norms and activations are torch's, or their routing to experts is
    is_ordinary = family in {"opt", "gpt2"} | MIXTURES
    rounds = 1 if is_ordinary else 2
    expected, without = served(model, OFF, rounds, **options)
    found, ways = served(model, {}, rounds, **options)
    assert found == expected
    assert without == {}
    if is_ordinary:
        assert ways["replayed"] == ways["captured"] == 0
    else:
        assert ways["replayed"] > 3 * (ways["captured"] + ways["ordinary"]), ways


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "bfloat16"), ("llama", "float16")])
def test_half_precision(family: str, dtype: str, tmp_path: Path) -> None:
    """Also of a model whose projections have a bias. A CPU with units for float16 leaves its products to oneDNN: more
    than a graph holds operations of torch."""
    model = make_model(tmp_path, make_config(family, num_hidden_layers=5), getattr(torch, dtype))
    expected, _ = served(model, OFF, dtype=dtype)
    found, ways = served(model, {}, dtype=dtype)
    assert found == expected
    if dtype == "float16" and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        assert ways["replayed"] == ways["captured"] == 0
    else:
        assert ways["replayed"] > 3 * (ways["captured"] + ways["ordinary"]), ways


def test_a_graph_that_gives_other_bits_is_never_used(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = NativeGraphs._replay

    def wrong(self: NativeGraphs, graph: Any, *given: Any) -> bool:
        done = replay(self, graph, *given)
        graph.graph.result[0, 0] += 1.0
        return done

    monkeypatch.setattr(NativeGraphs, "_replay", wrong)
    with Engine(tiny_llama, OFF) as engine:
        expected = engine.alone(PROMPTS[:3])
    with Engine(tiny_llama) as engine:
        assert engine.alone(PROMPTS[:3]) == expected
        assert counts(engine)["replayed"] == 0


def test_a_request_with_nan_takes_no_graph_from_others(tmp_path: Path) -> None:
    """Its steps run the ordinary way, whose reference says what a row that sees NaN becomes; others' do not."""
    from safetensors.torch import load_file, save_file

    model = make_model(tmp_path, make_config("llama"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    prompts = [[5, 6, 7], [5, 77, 7], [9] * 40]
    answers = {}
    for name, ucm in (("off", OFF), ("on", {})):
        with Engine(model, ucm) as engine:
            # one row: captured by the broken one, then by a healthy one
            answers[name] = [engine.alone([prompts[1], prompts[0]], 12), engine.greedy(prompts, 12)]
            if name == "on":
                before = counts(engine)["replayed"]
                engine.alone([prompts[0]], 12)
                assert counts(engine)["replayed"] >= before + 10
    for on, off in zip(answers["on"], answers["off"], strict=True):
        assert [answer.tokens for answer in on] == [answer.tokens for answer in off]


def test_prompts_of_more_rows_run_the_ordinary_way(tiny_llama: Path) -> None:
    with Engine(tiny_llama) as engine:
        engine.generate([[5] * (MOST_ROWS + 1)], greedy_params(1))
        assert counts(engine) == {"replayed": 0, "captured": 0, "ordinary": 1}


def test_a_draft_model_has_graphs_of_its_own(tiny_llama: Path) -> None:
    """Verifications of drafts and the draft model's steps, in turns."""
    draft = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 3}
    found = {}
    for name, ucm in (("off", OFF), ("on", {})):
        with Engine(tiny_llama, ucm, max_num_seqs=6, speculative_config=draft) as engine:
            found[name] = engine.staggered(PROMPTS, ARRIVALS, 30)
            if name == "on":
                proposer: Any = engine.runner.parts.drafts.proposer
                assert any(graph.checked for graph in proposer._execution._graphs._graphs.values())
                assert counts(engine)["replayed"] > 0
    assert found["on"] == found["off"]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_and_its_model_have_graphs(method: str, tmp_path: Path) -> None:
    """Drafts too are the same to the bit, or a step would accept another number of them."""
    pair = make_pair(tmp_path, method, quiet=method == "eagle")
    found, steps = [], []
    for ucm in ({}, OFF):
        options = {"max_num_seqs": 4, "max_model_len": 256}
        with Engine(pair.target, ucm, **options, speculative_config=pair.speculation(3)) as engine:
            proposer: Any = engine.runner.parts.drafts.proposer
            drafts, propose = [], proposer.propose

            def kept(step: Any, drafts: Any = drafts, propose: Any = propose) -> Any:
                drafts.append(propose(step))
                return drafts[-1]

            proposer.propose = kept
            found.append([answer for prompt in PROMPTS[:4] for answer in engine.greedy([prompt], 24)])
            steps.append(drafts)
            if ucm != OFF:
                of_head = replays(proposer._execution._graphs)
                assert of_head > len(drafts)
                assert counts(engine)["replayed"] > len(drafts) / 2
            engine.check_idle()
    assert steps[0] == steps[1]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("method", "summary", "drafts"),
    [
        ("GSA", "box_mean", 0),
        ("GSA", "minmax", 3),
        ("GSA", "box_mean fp8", 3),
        ("KVStar", "box_mean", 3),
        ("KVStar", "hash", 0),
        ("KVStar", "hash", 3),
        ("GSA", "codes", 3),
    ],
)
def test_chosen_blocks_change_no_bit(method: str, summary: str, drafts: int, tiny_llama: Path) -> None:
    """Sparse and dense steps, verifications, locks and checks: tokens, and what choices are counted as. Before
    `minmax` torch computes features of queries, so those steps have no graph."""
    kind, _, dtype = summary.partition(" ")
    section: dict[str, Any] = {
        "summary": kind,
        "summary_dtype": dtype or "auto",
        "sparse_ratio": 0.4,
        "sparse_steps": "always",
        "min_tokens": 32,
        "local_window_sz": 1,
        "min_blocks": 2,
    }
    sparse = {"ucm_sparse_method": method, "ucm_sparse_config": {method: section}}
    lookup = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 256}
    if drafts:
        options["speculative_config"] = lookup
    found = {}
    for name, ucm in (("off", OFF), ("on", {})):
        with Engine(tiny_llama, {**ucm, **sparse}, **options) as engine:
            answers = [*engine.staggered(PROMPTS, ARRIVALS, 30), *engine.staggered(PROMPTS, ARRIVALS[::-1], 30)]
            worker = engine.runner.parts.sparse
            assert worker is not None
            assert worker.selector is not None
            found[name] = answers, worker.selector.counts()
            if (graphs := graphs_of(engine)) is not None:
                replays = any(key.selects and graph.checked for key, graph in graphs._graphs.items())
                assert replays == (kind != "minmax")
                assert counts(engine)["replayed"] > 0
    assert found["on"] == found["off"]
