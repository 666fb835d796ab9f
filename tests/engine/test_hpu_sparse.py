"""Sparse methods on the simulated card, in HPU graphs: the CPU's tokens, and nothing compiled once warm."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.connector import transfer
from tests.engine.hpu_counts import BEFORE_BUCKETS, broken_duties, count_layer_graphs, layer_graphs, remains
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.protocol.attachments import buckets_of

# starts engines on the simulated card
pytestmark = pytest.mark.slow

RNG = random.Random(6)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (5, 60, 130, 220)]
OPTIONS: dict[str, Any] = {
    "max_model_len": 320,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 80,
}
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2, "sparse_ratio": 0.4}
# the least that leaves a choice, for a prompt and for decodes with and without chosen blocks; each is compiled
MAX_GRAPHS = 7
# the largest alone, which every step takes
FEW_GRAPHS = 4
# beside three for remainders of prompts
GRAPHS_OF_MEMORY_MODE = 4
METHODS: dict[str, dict[str, Any]] = {
    "GSA": {**WINDOWS, "dense_layers": [0], "summary": "minmax"},
    "ESA": WINDOWS,
    "KVStar": {**WINDOWS, "checkpoint_interval": 3, "summary": "codes"},
}
MEMORY_MODE_TOKENS = 24
# ESA's layers do what those of KVStar do; `test_hpu_traffic.py` has KVStar with a choice of graphs
COMPARED = {"GSA": MAX_GRAPHS, "KVStar": FEW_GRAPHS}


def ucm(method: str) -> dict[str, Any]:
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: METHODS[method]}}


def watch_outputs(engine: Engine) -> list[Any]:
    """What the worker gives the scheduler from now on."""
    outputs: list[Any] = []
    update = engine.core.scheduler.update_from_output

    def watched(scheduled: Any, output: Any) -> Any:
        outputs.append(output)
        return update(scheduled, output)

    engine.core.scheduler.update_from_output = watched
    return outputs


def serve(model: str, methods: dict[str, int]) -> dict[str, Any]:
    """Answers of each method with so many graphs, and the card's counts when warm and in the end."""
    found = {}
    for method, max_graphs in methods.items():
        before = count_layer_graphs()
        graphs = {"mode": "auto", "warm_up": "full", "max_graphs": max_graphs}
        with Engine(Path(model), {**ucm(method), "graphs": graphs}, **OPTIONS) as engine:
            from habana_frameworks.torch.simulator import card

            warm = card.compilations, card.compiled_graphs, card.bypasses
            outputs = watch_outputs(engine)
            answers = engine.staggered(PROMPTS, [0, 1, 3, 7], 12)
            served = card.compilations, card.compiled_graphs, card.bypasses
            assert engine.runner.static is not None
            sent = [step for step, output in enumerate(outputs) if buckets_of(output) is not None]
            graphs_of_layers = layer_graphs(engine, before)
            selected = max(bucket.selected_blocks for bucket in engine.runner.static.execution.ready.buckets.forward)
            found[method] = {
                "answers": [dataclasses.asdict(answer) for answer in answers],
                "warm": warm,
                "served": served,
                "selected": selected,
                "sent": sent,
                "layers": graphs_of_layers,
                "broken": broken_duties(),
                "remains": remains(),
            }
    return found


def check_layers(found: dict[str, int], kinds: int) -> None:
    """All layers that do the same are one graph for each bucket. kinds: of what layers do where blocks are chosen."""
    most = found["buckets"] + (kinds - 1) * found["choosing"] + BEFORE_BUCKETS
    assert found["buckets"] > BEFORE_BUCKETS, "else the bound below says nothing"
    assert 0 < found["graphs"] <= most, "there are two layers: graphs of their own would be more"


MEMORY_MODE: dict[str, Any] = {
    **ucm("ESA"),
    "memory_mode": {
        "enabled": True,
        "on_device_ratio": 0.4,
        "refresh_steps": 3,
        "history_decay": 0.0,
        "max_missed": 1.0,
    },
}


def memory_mode_engine(model: str, options: dict[str, Any]) -> Engine:
    """Prompts come from a store, never from the prefix cache."""
    transferred = transfer({"kind": "memory"})
    return Engine(Path(model), options, **OPTIONS, enable_prefix_caching=False, kv_transfer_config=transferred)


def answers_after_partial_loads(engine: Engine) -> list[Answer]:
    """First tokens of stored prompts. Their remainders have 5, 12, 2 and 12 tokens; the first has no context."""
    engine.greedy(PROMPTS, 1)
    for _ in range(3):
        engine.step()
    assert engine.runner.transfer is not None
    connector: Any = engine.runner.transfer.connector
    assert connector.worker_side.saver.flush(60.0)
    return engine.greedy(PROMPTS, 1)


def serve_memory_mode(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """What memory mode moved, and the card's counts when warm and in the end. The second time prompts are stored."""
    graphs = {"mode": "auto", "warm_up": "full", "max_graphs": GRAPHS_OF_MEMORY_MODE}
    with memory_mode_engine(model, {**options, "graphs": graphs}) as engine:
        from habana_frameworks.torch.simulator import card

        warm = card.compilations, card.compiled_graphs, card.bypasses
        first = answers_after_partial_loads(engine)
        left = engine.core.scheduler.offload.totals.stored
        answers = [engine.staggered(PROMPTS, [0, 1, 3, 7], MEMORY_MODE_TOKENS) for _ in range(2)]
        served = card.compilations, card.compiled_graphs, card.bypasses
        totals = msgspec.structs.asdict(engine._core.scheduler.offload.totals)
    return {
        "first": [dataclasses.asdict(answer) for answer in first],
        "left": left,
        "lengths": [len(answer.tokens) for answer in answers[0] + answers[1]],
        "stored": [answer.cached_tokens for answer in answers[1]],
        "warm": warm,
        "served": served,
        "totals": totals,
    }


def serve_all(model: str) -> dict[str, Any]:
    """Both, in one process."""
    return {"methods": serve(model, COMPARED), "memory mode": serve_memory_mode(model, MEMORY_MODE)}


@pytest.fixture(scope="module")
def on_card(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_on_card(serve_all, tmp_path_factory.mktemp("sparse"), model=str(tiny_llama)).result
    return found


def test_tokens_and_compilations(tiny_llama: Path, on_card: dict[str, Any]) -> None:
    """covers: B1 C16 C17"""
    for method, run in on_card["methods"].items():
        with Engine(tiny_llama, ucm(method), **OPTIONS) as engine:
            expected = engine.staggered(PROMPTS, [0, 1, 3, 7], 12)
        assert_same([Answer(**answer) for answer in run["answers"]], expected)
        assert run["served"] == run["warm"], method
        assert run["selected"] > 0
        assert run["sent"] == [0], "the first step tells the scheduler the buckets"
        assert run["warm"][1] > 0
        if COMPARED[method] == MAX_GRAPHS:
            check_layers(run["layers"], kinds=1 + ("dense_layers" in METHODS[method]))
        assert run["broken"] == {}, method
        assert run["remains"] == [], method


def test_memory_mode_compiles_nothing_once_warm(tiny_llama: Path, on_card: dict[str, Any]) -> None:
    """covers: B1. Blocks leave and come back, and prompts come from a store, in part, by recipes that were compiled
    before; their first tokens are those of the CPU at true shapes."""
    found = on_card["memory mode"]
    assert found["lengths"] == [MEMORY_MODE_TOKENS] * len(PROMPTS) * 2
    assert found["stored"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert found["totals"]["released"]
    assert found["totals"]["loaded"]
    assert found["served"] == found["warm"]
    assert found["left"]
    with memory_mode_engine(str(tiny_llama), MEMORY_MODE) as engine:
        assert_same([Answer(**answer) for answer in found["first"]], answers_after_partial_loads(engine))
        assert engine.core.scheduler.offload.totals.stored == found["left"]
