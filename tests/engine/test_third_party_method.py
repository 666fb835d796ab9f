"""Methods of third parties in the engine: one that scores blocks in its own way, and one of the bare interface."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS

RNG = random.Random(15)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (20, 100, 150)]
OPTIONS: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 60,
}
STATIC = {"mode": "eager", "recipe_check": "fail", "max_graphs": 12, "warm_up": "full"}
WINDOWS = {"sparse_steps": "always", "min_tokens": 48, "local_window_sz": 1, "min_blocks": 2, "sparse_ratio": 0.5}
MAX_TOKENS = 20


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """What is registered here ends with these tests."""
    with SPARSE_METHODS.scope():
        UcmSparseFactory.register_sparse_method("Recency", "tests.sparse.recency", "Recency")
        UcmSparseFactory.register_sparse_method("HookLog", "tests.sparse.hook_log", "HookLog")
        yield


def recency(prefer: str, static: bool) -> dict[str, Any]:
    ucm = {"ucm_sparse_method": "Recency", "ucm_sparse_config": {"Recency": {**WINDOWS, "prefer": prefer}}}
    return {**ucm, "graphs": STATIC} if static else ucm


class Watched(Engine):
    """Compares after every step what the device has stored for each request with the blocks that competed.

    looked_at: choices among several blocks.
    """

    looked_at = 0
    prefer = "newest"

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        worker = self.runner.parts.sparse
        assert worker is not None
        assert worker.state is not None
        assert worker.selector is not None
        slots = worker.state.slots
        for slot in slots._slots.values():
            candidates = slots.candidates[slot].nonzero()[0].tolist()
            # sinks never compete
            assert 0 not in candidates
            wanted = candidates[::-1] if self.prefer == "newest" else candidates
            stored_rows = [layer.stored[slot].tolist() for layer in worker.selector.layers]
            for stored in stored_rows if slots.num_stored[slot] else ():
                assert stored[: len(wanted)] == wanted[: len(stored)]
                self.looked_at += len(wanted) > 1
        return outputs


def serve(model: Path, prefer: str, static: bool) -> list[Answer]:
    with Watched(model, recency(prefer, static), **OPTIONS) as engine:
        engine.prefer = prefer
        answers = engine.staggered(PROMPTS, [0, 1, 2], MAX_TOKENS)
        engine.check_idle()
        assert engine.looked_at > 2 * MAX_TOKENS
        assert engine.runner.parts.sparse is not None
        assert engine.runner.parts.sparse.state is not None
        totals = engine.runner.parts.sparse.state.totals
        # a choice leaves something out
        assert totals.attended_blocks < 0.8 * totals.context_blocks
    return answers


@pytest.fixture(scope="module")
def newest(tiny_llama: Path, registered: None) -> list[Answer]:
    return serve(tiny_llama, "newest", static=False)


def test_its_scores_decide_inside_of_graphs_too(tiny_llama: Path, newest: list[Answer]) -> None:
    """One file, registered by name; nothing is compiled after warm-up."""
    assert_same(serve(tiny_llama, "newest", static=True), newest)


def test_its_option_has_an_effect(tiny_llama: Path, newest: list[Answer]) -> None:
    """covers: C4"""
    oldest = serve(tiny_llama, "oldest", static=False)
    assert oldest[0].tokens == newest[0].tokens  # too short to choose
    assert [answer.tokens for answer in oldest[1:]] != [answer.tokens for answer in newest[1:]]


def test_hooks_of_the_bare_interface(tiny_llama: Path, newest: list[Answer]) -> None:
    """covers: C17. Every hook is called, in order; a layer's hooks once in each step; nothing else changes."""
    steps = 3
    with Engine(tiny_llama, {"ucm_sparse_method": "HookLog"}, **OPTIONS) as engine:
        assert engine.runner.parts.sparse is not None
        worker: Any = engine.runner.parts.sparse.method
        scheduler: Any = engine._core.scheduler.sparse
        assert worker.calls == [("register_kv_caches",)]
        (answer,) = engine.greedy(PROMPTS[:1], steps)
        engine.step()  # tells the worker of the end
    assert answer.tokens == newest[0].tokens[:steps]
    layers = [(hook, layer) for layer in range(2) for hook in ("attention_begin", "attention_finished")]
    step = [("update_states",), ("execute_begin",), *layers, ("execute_finished",)]
    ((_, request_id),) = [call for call in scheduler.calls if call[0] == "request_begin"]
    end = [("request_finished_in_worker", request_id), ("update_states",)]
    assert worker.calls[1:] == [*step * steps, *end]
    hooks = [hook for hook, *_ in scheduler.calls]
    assert hooks[0] == "register_block_size"
    # the end of whoever had the id before, the request, its steps, its end, and the step that tells of it
    built = ["build_sparse_meta"] * steps
    told = ["request_finished_in_scheduler"]
    assert hooks[1:] == [*told, "request_begin", *built, *told, "build_sparse_meta"]
