"""Steps that are dense because a choice would not pay: as short as those of a dense engine, and choices after them are
those that they would have been."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.layers.cpu import packed_weights
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import set_times

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
OPTIONS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 4, "max_num_batched_tokens": 128}
WINDOWS = {"sparse_ratio": 0.2, "min_tokens": 40, "min_blocks": 1, "init_window_sz": 1, "local_window_sz": 1}
PROMPTS = [[3 + (7 * i * i + 13 * i + seed) % (VOCAB - 3) for i in range(90 + 20 * seed)] for seed in range(3)]
# begins as the first one does, and ends within a block of it
PROMPTS.append([*PROMPTS[0][:85], 7, 8, 9])


class Pays:
    """In place of `ChoiceCost`: asked so many times it does not pay, then so many times it does, and so on. It is asked
    again where a step is sparse, another request comes, or a block of one begins or becomes full."""

    def __init__(self, *lengths: int) -> None:
        self._turns = [bool(index % 2) for index, length in enumerate(lengths) for _ in range(length)]
        self.asked = 0

    def pays(self, budgets: object) -> bool:
        self.asked += 1
        return self._turns[self.asked % len(self._turns)]


def ucm(method: str, **more: Any) -> dict[str, Any]:
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: WINDOWS}, **more}


def counted(engine: Engine) -> Counter[str]:
    """How often a step followed its blocks, told totals, and asked whether choices are native calls."""
    counts: Counter[str] = Counter()
    sparse = engine.runner.parts.sparse
    assert sparse is not None
    assert sparse.state is not None
    for owner, name in ((sparse.state, "_follow"), (sparse, "step"), (sparse._metrics, "totals")):
        inner = getattr(owner, name)

        def call(*args: Any, inner: Any = inner, name: str = name) -> Any:
            counts[name] += 1
            return inner(*args)

        setattr(owner, name, call)
    return counts


def counted_runs(graphs: Any) -> list[int]:
    """Rows of the steps that run without a graph."""
    rows: list[int] = []
    run = graphs._run

    def call(step: Any, metadata: Any) -> Any:
        rows.append(len(step.token_ids))
        return run(step, metadata)

    graphs._run = call
    return rows


@pytest.fixture(autouse=True)
def unmeasured_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule chooses native products for few rows; measured times may not, and then no step is a native graph."""
    monkeypatch.setattr(packed_weights, "learn_ways", lambda kinds: None)
    set_times({})


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_dense_steps_look_at_blocks_where_one_begins_or_ends(tiny_llama: Path, method: str) -> None:
    with Engine(tiny_llama, ucm(method), **OPTIONS) as engine:
        pays = Pays(1)
        engine.core.scheduler.sparse.selecting_method.register_choice_cost(pays)
        counts = counted(engine)
        execution: Any = engine.runner.parts.steps.execution
        graphs = execution._graphs
        ordinary = counted_runs(graphs)
        found = engine.greedy(PROMPTS[:1], 100)
        steps, followed = counts["step"], counts["_follow"]
        assert engine.core.scheduler.sparse.selecting_method.dense_steps >= 99
        # the prompt, and of each block the steps that begin it and fill it
        assert followed <= 1 + 2 * (100 // BLOCK + 1) < steps / 4
        assert pays.asked <= 2 * (100 // BLOCK + 1)
        assert counts["totals"] == 0
        # the prompt, and a decode that is compared with its graph; steps that fill a block have the same one
        assert ordinary == [90, 1]
        assert not any(key.selects for key in graphs._graphs)
        # all that is full has its summary
        assert engine.runner.parts.sparse is not None
        assert engine.runner.parts.sparse.state is not None
        assert not engine.runner.parts.sparse.state.summaries.waits
        assert engine.runner.parts.sparse.state.summaries.ready.sum() == (90 + 99) // BLOCK
    with Engine(tiny_llama, **OPTIONS) as engine:
        assert engine.greedy(PROMPTS[:1], 100)[0].tokens == found[0].tokens


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_choices_after_dense_steps(tiny_llama: Path, method: str) -> None:
    """covers: C13 C17. Steps turn from dense to sparse and back, requests come and go, share prefixes, and hit a part
    of a block; against an engine that looks at every block in every step."""
    found, counts = [], []
    for steady in (True, False):
        with Engine(tiny_llama, ucm(method, kv_cache={"partial_hits": True}), **OPTIONS) as engine:
            engine.core.scheduler.sparse.selecting_method.register_choice_cost(Pays(2, 7, 3, 1, 1, 9))
            sparse = engine.runner.parts.sparse
            assert sparse is not None
            assert sparse.state is not None
            if not steady:
                sparse.state._steady.go_on = lambda request_ids, batch: False  # type: ignore[method-assign]
                sparse.state._choices.go_on = lambda *step: None  # type: ignore[method-assign]
            counts.append(counted(engine))
            found.append(engine.staggered(PROMPTS, [0, 3, 40, 60], 70))
            found[-1] += engine.greedy(PROMPTS, 50)
            engine.check_idle()
            modes = dict(sparse.state.totals.modes)
            assert sum(modes.values()) > 20
            assert engine.core.scheduler.sparse.selecting_method.dense_steps > 40
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
    assert counts[0]["_follow"] < 0.8 * counts[1]["_follow"] == 0.8 * counts[1]["step"]
