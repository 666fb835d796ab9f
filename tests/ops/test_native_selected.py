"""The selected part in C++: any batch equals the oracle, whichever blocks a layer brings to the plan of the step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings

from tests.ops.batch import Batch, Memory, Request, Shape, build, sparse_requests_strategy
from tests.ops.oracle import assert_matches, attend
from tests.ops.selected_part import MIXED
from tests.ops.unified_attention import COMMON, shapes
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.impl import reference
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import native_jobs
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))


@given(requests=sparse_requests_strategy(block_size=4), shape=shapes())
@settings(COMMON, max_examples=60)
def test_any_choice_equals_the_oracle(requests: list[Request], shape: Shape) -> None:
    """covers: C15, C16. One row and several, pads, next to causal, shared and unique parts; poison in all else.

    The reference equals it too: tests/ops/test_selected_part.py.
    """
    assert_matches(build(requests, shape), "native")


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 64), (8, 1, 32), (6, 2, 20)])
@pytest.mark.parametrize("memory", get_args(Memory))
def test_cache_types_and_heads(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, memory: Memory) -> None:
    """covers: C15. Without a look at what is not seen: poison would send it to the reference."""
    shape = Shape(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim + 4, dtype=dtype, memory=memory)
    assert_matches(build(MIXED, shape), "native", prepared=True)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("row_tile", [2, 64])
@pytest.mark.parametrize("token_tile", [4, 9, 1024])
def test_any_tiling_is_the_same(monkeypatch: pytest.MonkeyPatch, row_tile: int, token_tile: int) -> None:
    monkeypatch.setattr(native_jobs, "ROW_TILE", row_tile)
    monkeypatch.setattr(native_jobs, "TOKEN_TILE", token_tile)
    assert_matches(build(MIXED, Shape()), "native")


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_blocks_of_many_tiles(block_size: int, rows: int) -> None:
    """Numbers of query vectors that are multiplied in other ways, with tiles that end inside a block."""
    request = Request(9 * block_size + 5, rows, chosen=frozenset({1, 4, 6, 7}), dropped=frozenset({2, 8}))
    assert_matches(build([request], Shape(9, 3, 64, 64, block_size)), "native")


@pytest.mark.usefixtures("no_reference")
def test_every_layer_brings_its_blocks_to_one_plan() -> None:
    """Layers choose differently; one that brings none has the plan's own blocks, whatever was before."""
    layers = [
        build([Request(31, 1, chosen=chosen, dropped=rest), Request(32, 4, chosen=chosen, dropped=rest)], Shape())
        for chosen, rest in (({0, 2, 5}, {1, 3, 4}), ({1, 3, 4}, {0, 2, 5}), ({0, 1, 2}, {3, 4, 5}))
    ]
    first = layers[0].parts.selected
    assert first is not None
    ready = prepare(layers[0].parts, 4, implementation="native")
    for batch in (*layers, layers[0]):
        own = None if batch is layers[0] else blocks_at(batch, first.spans, first.hi)
        tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
        found = unified_attention(*tensors, ready, batch.spec, selected_blocks=own)
        torch.testing.assert_close(found, attend(batch, "native"))


def blocks_at(batch: Batch, spans: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """The blocks that the requests of the batch chose, at the entries of another batch's part."""
    blocks = torch.zeros_like(spans)
    for span, (request, table) in enumerate(zip(batch.requests, batch.tables, strict=True)):
        blocks[(spans == span) & (hi > 0)] = torch.tensor([table[index] for index in request.chosen])
    return blocks


def test_a_request_is_one_job() -> None:
    """Chosen and live blocks, and a verification's drafts: keys are read once for all its rows, nothing is merged."""
    requests = [
        Request(31, 1, chosen=frozenset({1, 4}), dropped=frozenset({2})),
        Request(26, 5, chosen=frozenset({1, 4}), dropped=frozenset({2})),
    ]
    jobs = native_jobs.make_jobs(build(requests, Shape(pads=1)).parts, 4)
    found = [(row_hi - row_lo, span_hi - span_lo) for row_lo, row_hi, span_lo, span_hi, *_ in jobs.jobs.tolist()]
    assert sorted(found) == [(1, 7), (5, 6)]
    assert jobs.partials == 0


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_a_chosen_block_outside_of_the_cache_is_refused(bad: int) -> None:
    """covers: C13. Also -1, which fills rankings of too few candidates; a pad's block is not looked at."""
    batch = build(MIXED, Shape())
    part = batch.parts.selected
    assert part is not None
    blocks = part.blocks.masked_fill(part.hi == 0, bad)
    assert torch.equal(attend(batch, "native", selected_blocks=blocks), attend(batch, "native"))
    blocks[int(part.hi.argmax())] = bad
    with pytest.raises(IndexError, match="or of selected_blocks is outside of the cache, which has"):
        attend(batch, "native", selected_blocks=blocks)


def test_a_part_of_pads_alone_changes_nothing() -> None:
    """Bit for bit: the jobs are the dense ones."""
    batch = build([replace(request, chosen=frozenset(), dropped=frozenset()) for request in MIXED], Shape())
    part = build(MIXED, Shape()).parts.selected
    assert part is not None
    padded = batch.parts._replace(selected=part._replace(hi=torch.zeros_like(part.hi)))
    assert torch.equal(attend(replace(batch, parts=padded), "native"), attend(batch, "native"))


def test_what_is_chosen_and_not_finite_is_reported() -> None:
    """covers: D8. The reference then says what the row becomes."""
    batch = build([Request(31, 1, chosen=frozenset({3}))], Shape())
    batch.value_cache[batch.tables[0][3], 2] = math.nan
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    plan = ATTENTION.make("native").plan(batch.parts, 4)
    assert not ATTENTION.make("native").attend(*tensors, plan, batch.spec, torch.empty_like(batch.query))
    assert attend(batch, "native")[0].isnan().all()


def test_without_kernels_the_reference_is_asked() -> None:
    batch = build(MIXED, Shape(poison=0.0))
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    assert not ATTENTION.make("cpu").attend(
        *tensors, ATTENTION.make("cpu").plan(batch.parts, 4), batch.spec, torch.empty_like(batch.query)
    )
    assert_matches(batch, "cpu")
