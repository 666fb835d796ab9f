"""Buckets that a server with a sparse method has without being asked: for steps that read few of their blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.sparse_decodes import sparse_decodes, sparse_verifications
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions

COST = CostModel(device_spec("h200"), LLAMA_8B, 128)
LIVE = 4  # a sink, two blocks of the window and the tail
STRATEGY_NAMES = ("padding_aware", "exponential", "linear")


def limits_of(requests: int, ratio: float) -> Limits:
    longest = block_budget(33024, 128, GsaOptions(sparse_ratio=ratio))
    assert longest is not None
    blocks = requests * 258 + 1
    most = min(requests * longest.num_selected, blocks)
    return Limits(2048, requests, 33024, 128, blocks, False, 516, most)


def buckets_of(
    limits: Limits, max_graphs: int | None, strategy: str = "padding_aware", live: int = LIVE + 1
) -> BucketSet:
    return STRATEGIES.get(strategy)().choose(BucketRequest(limits, COST, max_graphs, live_blocks=live))


def sparse_step(requests: int, tokens: int, ratio: float, shared: int = 0) -> Bucket:
    budget = block_budget(tokens, 128, GsaOptions(sparse_ratio=ratio))
    assert budget is not None
    phase = "-su" if shared else "--u"
    return Bucket(phase, requests, shared, requests * LIVE - shared, requests, requests * budget.num_selected)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_sparse_decode_does_not_pay_for_a_dense_one(strategy: str) -> None:
    """8 requests of 32K at 10 %: not a bucket of 2064 unique blocks; nor with a common prefix, nor one alone."""
    buckets = buckets_of(limits_of(8, 0.1), 32, strategy)
    assert buckets.num_graphs <= 32
    for step in (sparse_step(8, 32768, 0.1), sparse_step(8, 32768, 0.1, shared=1), sparse_step(1, 32768, 0.1)):
        found = buckets.lookup(step)
        assert found.unique_blocks <= 8 * (LIVE + 1), (step, found)
        assert COST.step(found) <= 1.15 * COST.step(step), (step, found)
    without = buckets_of(limits_of(8, 0.1), 32, strategy, live=0)
    assert without.lookup(sparse_step(8, 32768, 0.1)).unique_blocks == 2064, "the case tells nothing"


@pytest.mark.parametrize(("requests", "ratio"), [(8, 0.1), (8, 0.3), (32, 0.1), (32, 0.3)])
def test_padding_of_sparse_decodes_is_small(requests: int, ratio: float) -> None:
    """Any number of requests, of contexts of any length: modelled cost over the true one."""
    random = np.random.default_rng(0)
    buckets = buckets_of(limits_of(requests, ratio), 64)
    padded = true = 0.0
    for _ in range(300):
        running = int(random.integers(1, requests + 1))
        steps = [sparse_step(1, int(tokens), ratio) for tokens in random.integers(2048, 33000, running)]
        sums = np.array([step[1:6] for step in steps]).sum(0).tolist()
        step = Bucket("--u", *sums)
        padded += COST.step(buckets.lookup(step))
        true += COST.step(step)
    assert padded / true <= 1.15


def test_the_grid_has_two_thirds_of_the_graphs() -> None:
    """And with too few graphs for both, it goes first."""
    limits = limits_of(8, 0.1)
    buckets = buckets_of(limits, 64)
    levels = partial(STRATEGIES.get("padding_aware")().levels, COST)
    family = sparse_decodes(limits, COST, LIVE + 1, 64 // 3, levels)
    rest = buckets_of(limits, 64 - len(family), live=0)
    assert 2 < len(family) <= 64 // 3
    assert set(buckets.forward) == {*rest.forward, *family}
    few, least = buckets_of(limits, 12), buckets_of(limits, 11, live=0)
    assert few.num_graphs <= 12
    assert set(least.forward) <= set(few.forward)


def test_servers_without_such_shapes() -> None:
    """No method, slices of the cache, slots for tokens, room for none."""
    limits = limits_of(8, 0.1)
    levels = STRATEGIES.get("linear")().levels

    def made(within: Limits, live: int = 5, most: int = 8) -> int:
        return len(sparse_decodes(within, COST, live, most, lambda *axis: levels(COST, *axis)))

    assert made(limits) > 2
    assert made(limits, most=1) == 1
    assert [
        made(limits.dense),
        made(replace(limits, contiguous=True)),
        made(replace(limits, strip=64, max_shared_blocks=600)),
    ] == [0, 0, 0]
    assert [made(limits, live=0), made(limits, most=0)] == [0, 0]


def verification(requests: int, drafts: int, ratio: float, without: int = 0) -> Bucket:
    """A step of requests at 32K with drafts, `without` of them without any."""
    budget = block_budget(32768, 128, GsaOptions(sparse_ratio=ratio))
    assert budget is not None
    rows = (requests - without) * (1 + drafts) + without
    phase = "csu" if without else "cs-"
    live = (requests - without) * LIVE
    return Bucket(phase, rows, live, without * LIVE, requests, requests * budget.num_selected)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_sparse_verification_costs_little_more_than_a_decode(strategy: str) -> None:
    """8 requests of 32K with 4 drafts: not the bucket of a prompt; nor where some have no drafts, or few run."""
    limits = limits_of(8, 0.1)
    request = BucketRequest(limits, COST, 32, live_blocks=LIVE + 1, rows_each=5)
    buckets = STRATEGIES.get(strategy)().choose(request)
    assert buckets.num_graphs <= 32
    decode = COST.step(buckets.lookup(sparse_step(8, 32768, 0.1)))
    for step in (verification(8, 4, 0.1), verification(8, 4, 0.1, without=3), verification(2, 4, 0.1)):
        found = buckets.lookup(step)
        assert found.query_len <= 40
        assert COST.step(found) <= 1.2 * COST.step(step), (step, found)
        assert COST.step(found) <= 1.1 * decode
    if strategy == "padding_aware":
        without = buckets_of(limits, 32, strategy).lookup(verification(8, 4, 0.1))
        assert COST.step(without) > 2 * decode, "the case tells nothing"


def test_servers_without_verifications() -> None:
    """No drafts, no method, slices of the cache; one request has no other beside it without drafts."""
    limits = limits_of(8, 0.1)
    levels = partial(STRATEGIES.get("linear")().levels, COST)

    def made(within: Limits, rows_each: int = 5, most: int = 8) -> int:
        return len(sparse_verifications(within, COST, LIVE + 1, rows_each, most, levels))

    assert made(limits) > 2
    assert made(limits, most=1) == 1
    assert [made(limits, rows_each=1), made(limits.dense), made(replace(limits, contiguous=True))] == [0, 0, 0]
    alone = sparse_verifications(limits_of(1, 0.1), COST, LIVE + 1, 5, 8, levels)
    assert {shape.phase for shape in alone} == {"cs-"}
    assert max(shape.query_len for shape in alone) == 5
