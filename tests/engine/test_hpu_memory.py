"""Memory of a small simulated card: graphs are measured first, the KV cache gets what they leave. covers: B7"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import transfer
from tests.engine.hpu_process import Finished, run_on_card
from tests.engine.serving import Engine
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import fit_to_memory
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.records import graph_name

# starts engines on the simulated card
pytestmark = pytest.mark.slow

MIB = 1 << 20
CARD = 64 * MIB
GRAPH = 2 * MIB
UTILIZATION = 0.9
BUDGETS = (None, 21, 3)
MAX_GRAPHS = 16
GRAPHS_WITH_TAILS = 18  # of which the strategy uses all, with two for remainders or without
SKELETON = 2
# Buffers of the static inputs and of sampling, beside the graphs: of 64 tokens and 8 requests.
BUFFERS = 64 << 10
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": UTILIZATION,
}
PROMPT = list(range(3, 40))


def start_small(model: str, budget_mib: float | None) -> dict[str, Any]:
    """Starts an engine on a card of 64 MiB whose graphs take 2 MiB each, beside the tensors that they keep."""
    import habana_frameworks.torch as ht
    from habana_frameworks.torch.simulator import card

    card.free_bytes = card.total_bytes = CARD
    card.bytes_per_capture = GRAPH
    # all that a graph takes beside its tensors is said above
    card.workspace_bytes = 0
    graphs: dict[str, Any] = {"warm_up": "full", "max_graphs": MAX_GRAPHS, "skeleton": SKELETON}
    if budget_mib is not None:
        graphs["memory_budget"] = budget_mib / 1024
    try:
        engine = Engine(Path(model), {"graphs": graphs}, **OPTIONS)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with engine:
        static = engine.runner.static
        assert static is not None
        skeleton = choose_skeleton(static.execution.ready.buckets, None, SKELETON).keys
        free = ht.hpu.mem_get_info()[0]
        tokens = engine.greedy([PROMPT, PROMPT], 4)[0].tokens
        records = static.summary().records
        cache = sum(blocks.nbytes for blocks in engine.cached_blocks())
        after = ht.hpu.mem_get_info()[0]
        buckets, measured = (
            static.execution.ready.buckets,
            {record.key: record.size for record in records if record.key in skeleton},
        )
    return {
        "free": free,
        "free_after": after,
        "cache": cache,
        "tokens": tokens,
        "records": [
            {"name": graph_name(record.key), "state": record.state, "size": record.size, "reason": record.reason}
            for record in records
        ],
        "budget": static._warm_up._memory_budget,
        "most_wasteful_first": [
            graph_name(key) for key in fit_to_memory(buckets, measured, static._warm_up._memory_budget).dropped
        ],
    }


def start_with_remainders(model: str) -> dict[str, Any]:
    """The same card under memory mode, with prompts that may be loaded in part."""
    from habana_frameworks.torch.simulator import card

    card.free_bytes = card.total_bytes = CARD
    options = {**OPTIONS, "kv_transfer_config": transfer({"kind": "memory"})}
    config = {
        "ucm_sparse_method": "ESA",
        "ucm_sparse_config": {"ESA": {"sparse_steps": "always", "min_tokens": 32, "min_blocks": 2}},
        "memory_mode": {"enabled": True},
        "graphs": {"warm_up": "full", "max_graphs": GRAPHS_WITH_TAILS, "skeleton": SKELETON},
    }
    with Engine(Path(model), config, **options) as engine:
        static = engine.runner.static
        assert static is not None
        assert static.execution.remainders is not None
        assert static.execution._remainders is not None
        summary = static.summary()
        return {
            "shapes": len(static.execution.remainders.shapes),
            "graphs": static.execution._remainders.captured(),
            "tails": [record.size for record in summary.records if isinstance(record.key, RemainderShape)],
            "all": len(summary.records),
            "budget": static._warm_up._memory_budget,
            "used": summary.size,
        }


def start_several(model: str) -> list[dict[str, Any]]:
    """One after the other, in one process: loading vLLM takes longer than they do."""
    found = []
    for budget in BUDGETS:
        found.append(start_small(model, budget))
        # what an engine had is free again; nothing collects it by itself in this process
        gc.collect()
    return [*found, start_with_remainders(model)]


@pytest.fixture(scope="module")
def started(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_on_card(start_several, tmp_path_factory.mktemp("memory"), lazy=True, model=str(tiny_llama))


def warm_sizes(run: dict[str, Any]) -> list[int]:
    return [record["size"] for record in run["records"] if record["state"] == "warm"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_cache_gets_what_the_graphs_leave(started: Finished, number: int) -> None:
    """A tenth of the card, or twice the largest graphs, is kept without a budget; the budget with one."""
    run = started.result[number]
    kept = (6 * GRAPH, 21 * MIB)[number]
    left = CARD * UTILIZATION - kept
    assert left - 3 * MIB < run["cache"] < left, "the weights take the difference"
    assert sum(warm_sizes(run)) <= kept + BUFFERS
    assert run["free"] >= (1 - UTILIZATION) * CARD - BUFFERS
    assert run["free_after"] == run["free"], "requests take nothing more"


@pytest.mark.parametrize("number", [0, 1])
def test_what_does_not_fit_is_left_out_and_listed(started: Finished, number: int) -> None:
    """In the summary with reasons, and in the log in the order of waste."""
    run = started.result[number]
    dropped = {record["name"]: record["reason"] for record in run["records"] if record["state"] == "dropped"}
    assert {record["state"] for record in run["records"]} == {"warm", "dropped"}
    assert all(0.99 * GRAPH < size < 1.01 * GRAPH for size in warm_sizes(run))
    assert len(warm_sizes(run)) == MAX_GRAPHS - len(dropped)
    used = sum(warm_sizes(run))
    assert run["budget"] - 1.01 * GRAPH < used <= run["budget"], "no other graph fits"
    for reason in dropped.values():
        assert "do not fit" in reason
        assert "ucm.graphs.memory_budget" in reason
    wasteful = run["most_wasteful_first"]
    assert len(wasteful) >= 5
    lines = [line for line in started.log.splitlines() if "Warm-up leaves out" in line]
    # the starts follow each other; the last one is with remainders
    before = sum(record["state"] == "dropped" for other in started.result[:number] for record in other["records"])
    lines = lines[before : before + len(dropped)]
    assert len(lines) == len(dropped)
    for line, name in zip(lines, wasteful, strict=False):
        assert f"Warm-up leaves out {name}: {dropped[name]}" in line
    assert run["tokens"] == started.result[0]["tokens"]


def test_a_budget_that_cannot_hold_the_skeleton(started: Finished) -> None:
    """The start fails with one error: the option, what was needed and what was given, and what to do."""
    error = started.result[2]["error"]
    assert error.startswith("MemoryBudgetError: ucm.graphs.memory_budget is 0.003 GiB, but the 3 graphs")
    assert "take 0.006 GiB; raise it, lower --max-num-batched-tokens (now 64)" in error


def test_graphs_for_remainders_are_measured_and_part_of_the_budget(started: Finished) -> None:
    """Twice the largest graphs, these included."""
    run = started.result[3]
    assert run["graphs"] == run["shapes"] == len(run["tails"]) > 1
    assert sum(run["tails"]) == pytest.approx(run["shapes"] * GRAPH, abs=BUFFERS)
    assert run["all"] == GRAPHS_WITH_TAILS, "they are a part of ucm.graphs.max_graphs"
    assert run["budget"] == pytest.approx(2 * (3 + run["shapes"]) * GRAPH, abs=4 * BUFFERS)
    assert run["used"] <= run["budget"] + BUFFERS
