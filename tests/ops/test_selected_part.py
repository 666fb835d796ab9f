"""The selected part: blocks that a request's rows attend to because they were chosen for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.batch import Batch, Memory, Request, Shape, build, sparse_requests_strategy
from tests.ops.oracle import assert_matches, attend, budget, oracle
from tests.ops.selected_part import MIXED, _set
from tests.ops.unified_attention import COMMON, shapes
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.impl import reference
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec


def _every_block(batch: Batch, block_size: int) -> list[Request]:
    """All full blocks of every request's context in the selected part."""
    return [
        replace(request, chosen=frozenset(range(request.context // block_size)), dropped=frozenset())
        for request in batch.requests
    ]


@given(requests=sparse_requests_strategy(block_size=4), shape=shapes())
@COMMON
def test_any_choice_equals_the_oracle(requests: list[Request], shape: Shape) -> None:
    """covers: C15, C16. One row and several, shared prefixes, any GQA ratio; all that is not used is NaN or Inf."""
    assert_matches(build(requests, shape), "reference")


@given(requests=sparse_requests_strategy(block_size=4), shape=shapes())
@COMMON
def test_all_blocks_chosen_equals_dense(requests: list[Request], shape: Shape) -> None:
    """covers: C16. Moving every full block from shared and unique to selected changes rounding at most."""
    dense = build([replace(request, chosen=frozenset(), dropped=frozenset()) for request in requests], shape)
    sparse = build(_every_block(dense, 4), shape)
    difference = (attend(sparse, "reference") - attend(dense, "reference")).double().numpy()
    assert np.abs(difference).max(initial=0.0) <= budget(dense, oracle(dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (9, 3, 64), (4, 1, 64)])
def test_dtypes_and_heads(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """covers: C15"""
    shape = Shape(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim + 8, dtype=dtype)
    assert_matches(build(MIXED, shape), "reference", prepared=True)


@pytest.mark.parametrize("memory", get_args(Memory))
@pytest.mark.parametrize("block_size", [1, 16])
def test_caches_and_block_sizes(memory: Memory, block_size: int) -> None:
    scaled = [replace(request, cached=request.cached // 4 * block_size) for request in MIXED]
    assert_matches(build(scaled, Shape(block_size=block_size, memory=memory)), "reference")


def test_more_blocks_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of tiles are merged, and no scores are larger than a tile."""
    monkeypatch.setattr(reference, "ROW_TILE", 16)
    monkeypatch.setattr(reference, "TOKEN_TILE", 16)
    largest = 0
    plain = reference._attend_visible

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: object) -> object:
        nonlocal largest
        largest = max(largest, key.shape[0] * key.shape[1] * query.shape[1] if query.dim() == 4 else 0)
        return plain(query, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "_attend_visible", spy)
    long = [
        Request(400, 1, chosen=frozenset(range(3, 90))),
        Request(399, 3, chosen=frozenset(range(1, 70)), dropped=_set(0, 80)),
    ]
    assert_matches(build(long, Shape()), "reference")
    assert largest <= 16 * 16 // 8


@pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf, 1e4, 0.0])
@pytest.mark.parametrize("pads", [1, 7])
def test_pads_and_unused_blocks_never_reach_a_row(content: float, pads: int) -> None:
    """covers: A9, A10. More entries and spans than the step has: the result is the same to the last bit."""
    batch = build(MIXED, Shape(poison=content))
    part = batch.parts.selected
    assert part is not None
    zeros = torch.zeros(pads, dtype=torch.int64)
    padded = SelectedPart(
        torch.cat([part.blocks, zeros]),
        torch.cat([part.spans, zeros + part.first_rows.shape[0]]),
        torch.cat([part.hi, zeros]),
        torch.cat([part.first_rows, zeros + batch.query.shape[0] - 1]),
        torch.cat([part.num_rows, zeros]),
        part.max_rows + pads,
    )
    expected = attend(build(MIXED, Shape(poison=0.0)), "reference")
    wider = replace(batch, parts=batch.parts._replace(selected=padded))
    assert torch.equal(attend(batch, "reference"), expected)
    torch.testing.assert_close(attend(wider, "reference"), expected)
    assert_matches(wider, "reference")


def test_a_bad_token_of_a_chosen_block_breaks_the_rows_of_its_span_only() -> None:
    """covers: C16"""
    batch = build(MIXED, Shape(poison=1e4))
    expected = attend(batch, "reference")
    request = 3
    batch.value_cache[batch.tables[request][1], 2] = math.nan
    out = attend(batch, "reference")
    rows = range(batch.first_row[request], batch.first_row[request] + batch.requests[request].new)
    assert out[list(rows)].isnan().all()
    others = [row for row in range(out.shape[0]) if row not in rows]
    torch.testing.assert_close(out[others], expected[others])


def test_a_layer_gives_its_own_blocks() -> None:
    """Parts prepared once serve layers that chose differently."""
    batch = build(MIXED, Shape())
    part = batch.parts.selected
    assert part is not None
    expected = attend(batch, "reference")
    own = part.blocks.clone()
    batch.parts = batch.parts._replace(selected=part._replace(blocks=torch.zeros_like(own)))
    assert not torch.equal(attend(batch, "reference"), expected)
    for prepared in (False, True):
        assert torch.equal(attend(batch, "reference", prepared=prepared, selected_blocks=own), expected)


def test_a_step_of_selected_blocks_only() -> None:
    batch = build([Request(15, 1, chosen=frozenset(range(4)))], Shape())
    assert batch.parts[:3] == (None, None, None)
    assert prepare(batch.parts, 4, implementation="reference").plan is batch.parts
    assert_matches(batch, "reference", prepared=True)


def test_an_empty_selected_part() -> None:
    """A bucket may have room for none."""
    batch = build(MIXED, Shape())
    expected = attend(replace(batch, parts=batch.parts._replace(selected=None)), "reference")
    none = torch.zeros(0, dtype=torch.int64)
    for spans in (none, torch.zeros(1, dtype=torch.int64)):
        part = SelectedPart(none, none, none, spans, spans, 1)
        out = attend(replace(batch, parts=batch.parts._replace(selected=part)), "reference")
        assert torch.equal(out, expected)


def test_cost_follows_the_chosen_blocks() -> None:
    """Keys and values of a block are multiplied once with all rows of its span, whatever the batch is."""
    cache, query = torch.randn(64, 4, 2, 16), torch.randn(40, 4, 16)
    blocks = torch.arange(1, 11)
    part = SelectedPart(
        blocks, blocks % 2, torch.full_like(blocks, 4), torch.tensor([3, 20]), torch.tensor([3, 1]), max_rows=3
    )
    with FlopCounterMode(display=False) as counter:
        reference.selected(query, cache, cache, part, AttentionSpec(0.25), blocks)
    assert counter.get_total_flops() == 10 * 4 * 3 * 2 * 4 * 16 * 2


@pytest.mark.slow
def test_traces_as_one_graph() -> None:
    """No host read and no shape that depends on data is left in the traced operation: it must be capturable."""
    batch = build(MIXED, Shape())
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    compiled = torch.compile(unified_attention, backend="eager", fullgraph=True)
    out = compiled(*tensors, batch.parts, batch.spec, selected_blocks=batch.parts.selected.blocks)  # type: ignore[union-attr]
    torch.testing.assert_close(out, attend(batch, "reference"))


@pytest.mark.parametrize(
    ("change", "blocks", "message"),
    [
        ({}, torch.zeros(3, dtype=torch.int64), r"selected_blocks has shape \(3,\), expected \(10,\)"),
        ({}, torch.zeros(10, dtype=torch.int32), "selected_blocks has dtype torch.int32, expected torch.int64"),
        ({}, torch.zeros(10, dtype=torch.int64, device="meta"), "selected_blocks has device meta, expected cpu"),
        ({"spans": torch.zeros(1, 10, dtype=torch.int64)}, None, r"spans has shape \(1, 10\), expected \(10,\)"),
        ({"hi": torch.zeros(10, dtype=torch.int32)}, None, "hi has dtype torch.int32, expected torch.int64"),
        ({"num_rows": torch.ones(1, dtype=torch.int64)}, None, r"num_rows has shape \(1,\), expected \(5,\)"),
        ({"max_rows": 0}, None, "max_rows is 0, expected at least 1"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], blocks: torch.Tensor | None, message: str) -> None:
    """covers: C15. Nothing is broadcast silently, at one row or more; also with prepared parts."""
    batch = build(MIXED, Shape())
    assert batch.parts.selected is not None
    batch.parts = batch.parts._replace(selected=batch.parts.selected._replace(**change))  # type: ignore[arg-type]
    for prepared in (False, True):
        with pytest.raises(ValueError, match=message):
            attend(batch, "reference", prepared=prepared, selected_blocks=blocks)


def test_a_choice_without_a_selected_part() -> None:
    batch = build([Request(5, 1)], Shape())
    with pytest.raises(ValueError, match="selected_blocks are given, expected None without a selected part"):
        attend(batch, "reference", selected_blocks=torch.zeros(1, dtype=torch.int64))


@given(st.integers(0, 4), st.integers(1, 6))
@COMMON
def test_single_rows_and_verifications_see_the_same(decode: int, rows: int) -> None:
    """covers: C15, C16. A verification's first row is what a decode with the same choice gets."""
    chosen = _set(1, 2, 4)
    shape = Shape(seed=decode)
    single = build([Request(22, 1, chosen=chosen)], shape)
    several = build([Request(22, rows + 1, chosen=chosen)], shape)
    for name in ("key_cache", "value_cache"):
        for source, target in zip(single.tables[0], several.tables[0], strict=False):
            tokens = min(4, 22 - 4 * single.tables[0].index(source))
            getattr(several, name)[target, :tokens] = getattr(single, name)[source, :tokens]
    for name in ("query", "key", "value"):
        getattr(several, name)[0] = getattr(single, name)[0]
    slot = divmod(int(several.slots[0]), 4)
    several.key_cache[slot], several.value_cache[slot] = several.key[0], several.value[0]
    torch.testing.assert_close(attend(several, "reference")[0], attend(single, "reference")[0])
