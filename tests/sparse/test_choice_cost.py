"""Steps that are dense because choosing blocks would take longer than attending to all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.scheduler import scheduler_of
from tests.scheduler.schedulers import request, run_step
from tests.sparse.steps import BLOCK_SIZE, Live, decode
from vllm_gaudi_ucm.graphs.cost.specs import CHOICES, WRITTEN_OUT, device_spec
from vllm_gaudi_ucm.protocol.attachments import sparse_meta_of
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost
from vllm_gaudi_ucm.sparse.methods.gsa import GSA, GsaOptions
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar

# keys and values of 128 tokens in a layer of Llama 3.1 8B, and its summary `box_mean`
BLOCK_BYTES = 2 * 128 * 8 * 128 * 2
# choosing costs as much as reading six blocks
SIX_BLOCKS = ChoiceCost(1, 1, 1.0, 0.0, 1.0, 4.0, 2.0)


def cost_on(device: str, layers: int = 32) -> ChoiceCost:
    choice = CHOICES[device]
    bandwidth = device_spec(device).bandwidth
    return ChoiceCost(
        layers, layers, BLOCK_BYTES, BLOCK_BYTES / 16, bandwidth, choice.layer_seconds, choice.step_seconds
    )


@pytest.mark.parametrize(
    ("requests", "tokens", "ratio", "pays"),
    [
        (8, 32768, 0.1, True),
        (8, 32768, 0.3, True),
        (8, 32768, 0.95, False),
        (1, 131072, 0.1, True),
        (1, 131072, 0.3, True),
        (1, 8192, 0.1, False),
        (1, 2100, 0.3, False),
    ],
)
def test_on_an_h200_long_contexts_of_small_budgets_pay(requests: int, tokens: int, ratio: float, pays: bool) -> None:
    budget = block_budget(tokens, 128, GsaOptions(sparse_ratio=ratio))
    assert budget is not None
    assert cost_on("h200").pays([budget] * requests) is pays


def test_the_shortest_context_that_pays() -> None:
    """What the log says at start: shorter with more requests, and nothing if none pays."""
    options = GsaOptions(min_tokens=1, sparse_ratio=0.5)
    longest = 64 * BLOCK_SIZE
    one = SIX_BLOCKS.shortest_context(BLOCK_SIZE, options, 1, longest)
    two = SIX_BLOCKS.shortest_context(BLOCK_SIZE, options, 2, longest)
    assert one is not None
    assert two is not None
    assert two < one <= longest

    def pays(tokens: int) -> bool:
        budget = block_budget(tokens, BLOCK_SIZE, options)
        assert budget is not None
        return SIX_BLOCKS.pays([budget])

    assert (pays(one - BLOCK_SIZE), pays(one)) == (False, True)
    assert SIX_BLOCKS.shortest_context(BLOCK_SIZE, options, 1, one - 1) is None


def test_every_size_counts() -> None:
    """Five blocks saved of seven candidates do not pay for six, two requests of them do; nor do they where summaries
    are read, where few layers save, or where the saved blocks are small."""
    budget = block_budget(10 * BLOCK_SIZE, BLOCK_SIZE, GsaOptions(min_tokens=1, sparse_ratio=0.5))
    assert budget is not None
    assert (budget.num_candidates, budget.num_selected) == (7, 2)
    assert not SIX_BLOCKS.pays([budget])
    assert SIX_BLOCKS.pays([budget, budget])
    assert not ChoiceCost(1, 1, 1.0, 0.5, 1.0, 4.0, 2.0).pays([budget, budget])
    assert not ChoiceCost(1, 1, 0.5, 0.0, 1.0, 4.0, 2.0).pays([budget, budget])
    assert ChoiceCost(2, 1, 0.7, 0.0, 1.0, 4.0, 2.0).pays([budget]), "a layer that follows saves and costs nothing"
    assert not SIX_BLOCKS.pays([])


def begun(method: Any, *requests: Live) -> Any:
    method.selecting_method.register_choice_cost(SIX_BLOCKS)
    method.register_block_size(BLOCK_SIZE)
    for one in requests:
        method.request_begin(one.request_id, [0] * one.num_tokens)
    return method


def test_requests_are_sparse_together_or_not_at_all() -> None:
    """And the next choice after a dense step is a new one."""
    options = {"min_tokens": 20, "sparse_ratio": 0.5, "reuse_steps": 3}
    one, other = Live("one", 10 * BLOCK_SIZE), Live("other", 10 * BLOCK_SIZE)
    method = begun(GSA(UcmSparseRole.SCHEDULER, options), one, other)
    meta = decode(method, one)
    assert (meta.requests, meta.dense_steps) == ({}, 1)
    both = {"one", "other"}
    modes = []
    for _ in range(2):
        meta = decode(method, one, other)
        modes.append({name: selection.mode for name, selection in meta.requests.items()})
    assert modes == [dict.fromkeys(both, SelectionMode.SELECT), dict.fromkeys(both, SelectionMode.REUSE)]
    assert decode(method, one).requests == {}
    meta = decode(method, one, other)
    found = {name: selection.mode for name, selection in meta.requests.items()}
    assert found == {"one": SelectionMode.SELECT, "other": SelectionMode.REUSE}, "the other one had no step in between"
    assert meta.dense_steps == 2


def test_a_dense_step_unlocks() -> None:
    """KVStar sends the count of its base method, and locks anew when a step is sparse again."""
    one, other = Live("one", 10 * BLOCK_SIZE), Live("other", 10 * BLOCK_SIZE)
    method = begun(KVStar(UcmSparseRole.SCHEDULER, {"min_tokens": 20, "sparse_ratio": 0.5}), one, other)
    both = {"one", "other"}
    meta = decode(method, one, other)
    assert (set(meta.requests), meta.dense_steps, meta.locks) == (both, 0, (2, 0))
    meta = decode(method, one)
    assert (meta.requests, meta.dense_steps, meta.locks) == ({}, 1, (2, 1))
    meta = decode(method, one, other)
    found = {name: selection.mode for name, selection in meta.requests.items()}
    assert (found, meta.locks) == ({"one": SelectionMode.SELECT, "other": SelectionMode.REUSE}, (3, 1))


class Asked:
    """A cost that never lets a choice pay, and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def pays(self, budgets: object) -> bool:
        self.count += 1
        return False


@pytest.mark.parametrize("name", ["GSA", "KVStar"])
def test_a_dense_step_is_not_weighed_again_within_its_blocks(name: str) -> None:
    """Only where a block begins or becomes full, or other requests or drafts come."""
    kind = {"GSA": GSA, "KVStar": KVStar}[name]
    one, other = Live("one", 41), Live("other", 41)
    method: Any = begun(kind(UcmSparseRole.SCHEDULER, {"min_tokens": 20, "sparse_ratio": 0.5}), one)
    asked = Asked()
    method.selecting_method.register_choice_cost(asked)
    counts = []
    for step in range(12):
        assert decode(method, one).requests == {}
        counts.append(asked.count)
        assert method.selecting_method.dense_steps == step + 1
    # contexts of 41 to 52 tokens, blocks of 4
    assert counts == [1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6]
    one.num_tokens = 54
    decode(method, one)
    method.request_begin("other", [0] * 41)
    for change in ("a new request", "two of them", "a draft", "none any more", "preempted"):
        before = asked.count
        one.num_tokens = other.num_tokens = 54
        one.drafts = [7] if change == "a draft" else []
        if change == "preempted":
            method.request_preempted("one")
        decode(method, one, *([other] if change == "two of them" else []))
        assert asked.count == before + 1, change
    one.num_tokens = 54
    decode(method, one)
    method.selecting_method.register_choice_cost(ChoiceCost(1, 1, 1e9, 0.0, 1.0, 0.0, 0.0))
    assert list(decode(method, one).requests) == ["one"]


@pytest.mark.parametrize(("sparse_steps", "dense_steps"), [("auto", 2), ("always", 0)])
@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_the_scheduler_knows_the_sizes_of_its_server(
    tmp_path: Path, method: str, sparse_steps: str, dense_steps: int
) -> None:
    """A tiny model never pays; `always` is sparse nevertheless."""
    options = {"min_tokens": 20, "sparse_steps": sparse_steps}
    scheduler = scheduler_of(tmp_path, {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}})
    scheduler.add_request(request("a", 60))
    metas = [sparse_meta_of(run_step(scheduler)) for _ in range(3)]
    assert [meta is not None and bool(meta.requests) for meta in metas[1:]] == 2 * [sparse_steps == "always"]
    assert metas[-1] is not None
    assert metas[-1].dense_steps == dense_steps


def test_codes_that_become_floats_never_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a kernel for sign codes moves more to score a block than attention reads of it."""
    options = {"min_tokens": 20, "summary": "codes"}
    costs = []
    for sign_bytes in (0.0, WRITTEN_OUT):
        monkeypatch.setitem(CHOICES, "cpu", replace(CHOICES["cpu"], sign_bytes=sign_bytes))
        scheduler = scheduler_of(tmp_path, {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}})
        costs.append(scheduler.sparse.selecting_method.choice_cost)
    budget = block_budget(1 << 20, 128, GsaOptions(sparse_ratio=0.01))
    assert [cost.pays([budget] * 64) for cost in costs] == [True, False]


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_narrow_summaries_are_read_as_bytes(tmp_path: Path, method: str) -> None:
    """What a choice costs counts one byte for each element of a summary, whatever the keys have."""
    read = []
    for dtype in ("auto", "fp8"):
        options = {"min_tokens": 20, "summary_dtype": dtype}
        scheduler = scheduler_of(tmp_path, {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}})
        cost = scheduler.sparse.selecting_method.choice_cost
        assert cost is not None
        read.append(cost.summary_bytes)
    itemsize = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype.itemsize
    assert itemsize > 1
    assert read[0] == pytest.approx(read[1] * itemsize)
