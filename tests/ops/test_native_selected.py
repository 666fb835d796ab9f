"""The selected part in C++: any batch equals the oracle, whichever blocks a layer brings to the plan of the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.oracle import budget, oracle
from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.impl import cpu, native_jobs
from vllm_gaudi_ucm.ops.unified_attention.impl import native as implementation
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, SharedPart, UniquePart

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())

Fates = list[list[str]]  # per request and full block of its context: "live", "selected" or "left out"
PADS = 3  # entries, at both ends of the part


def full_blocks(request: Request, block_size: int) -> int:
    return (request.cached + (request.new == 1)) // block_size


def sparse(batch: Batch, shape: Shape, fates: Fates) -> Batch:
    """The batch with its full blocks selected, or left out and not to be seen, instead of shared or unique."""
    parts, block_size = batch.parts, shape.block_size
    unique_hi = None if parts.unique is None else parts.unique.hi.clone()
    shared_hi = None if parts.shared is None else parts.shared.hi.clone()
    entries: list[tuple[int, int]] = []
    for index, (table, first) in enumerate(zip(batch.tables, batch.first_row, strict=True)):
        rows = range(first, first + batch.requests[index].new)
        gone = [logical for logical, fate in enumerate(fates[index]) if fate != "live"]
        for logical in gone:
            if unique_hi is not None and parts.unique is not None:
                unique_hi[unique_entry(parts.unique, table[logical], rows[0])] = 0
            if shared_hi is not None and parts.shared is not None:
                shared_hi[index, parts.shared.blocks == table[logical]] = 0
            if fates[index][logical] == "selected":
                entries.append((index, table[logical]))
        hidden = [logical for logical in gone if fates[index][logical] == "left out"]
        for row in rows:
            keys, values = batch.seen[row] or pytest.fail("a real row sees itself")
            stays = ~torch.isin(torch.arange(len(keys)) // block_size, torch.tensor(hidden, dtype=torch.int64))
            batch.seen[row] = keys[stays], values[stays]
    batch.parts = parts._replace(
        unique=parts.unique and parts.unique._replace(hi=unique_hi),
        shared=parts.shared and parts.shared._replace(hi=shared_hi),
        selected=selected_part(batch, entries, block_size),
    )
    return batch


def unique_entry(part: UniquePart, block: int, row: int) -> Tensor:
    blocks = torch.arange(len(part.rows)) if part.blocks is None else part.blocks
    return (blocks == block) & (part.rows == row) & (part.hi > 0)


def selected_part(batch: Batch, entries: list[tuple[int, int]], block_size: int) -> SelectedPart:
    """One span per request; pads of hi 0 belong to any span, and those of the last one have no rows at all."""
    spans = len(batch.requests)
    first = torch.tensor([*batch.first_row, 0])
    rows = torch.tensor([*(request.new for request in batch.requests), 0])
    before, after = [(0, 0)] * PADS, [(spans, 0)] * PADS
    order = [entries[i] for i in torch.randperm(len(entries), generator=torch.Generator().manual_seed(1)).tolist()]
    owners, blocks = torch.tensor([*before, *order, *after]).unbind(1)
    hi = torch.tensor([0] * PADS + [block_size] * (len(order) + PADS))
    return SelectedPart(blocks.contiguous(), owners.contiguous(), hi, first, rows, int(rows.max()))


def attend(batch: Batch, plan: implementation.Plan, selected_blocks: Tensor | None = None) -> Tensor:
    out = torch.full((*batch.query.shape[:2], batch.value.shape[-1]), math.nan, dtype=batch.query.dtype)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    assert implementation.attend(*tensors, plan, batch.scale, out, selected_blocks=selected_blocks)
    return out


def assert_is_oracle(batch: Batch, out: Tensor) -> None:
    expected = oracle(batch)
    assert torch.isfinite(out).all(), "garbage reached a row"
    assert np.abs(out.double().numpy() - expected).max(initial=0.0) <= budget(batch, expected)


MIXED = [
    Request(29, 1, prefix=3),
    Request(16, 1, prefix=3),
    Request(0, 1),
    Request(26, 5, prefix=2),
    Request(8, 2, prefix=1, family=1),
    Request(0, 9),
]


def all_fates(requests: list[Request], block_size: int, pattern: list[str]) -> Fates:
    """Fates of the requests as `build` orders them."""
    ordered = sorted(requests, key=lambda request: request.new != 1)
    return [[pattern[i % len(pattern)] for i in range(full_blocks(request, block_size))] for request in ordered]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), requests=requests_strategy(4), contiguous=st.booleans(), seed=st.integers(0, 9))
def test_any_batch_equals_the_oracle(data: st.DataObject, requests: list[Request], contiguous: bool, seed: int) -> None:
    """covers: C16. One row, several rows, pads, next to causal, shared and unique parts; poison in all else."""
    shape = Shape(contiguous=contiguous, seed=seed)
    batch = build(requests, shape)
    fates = [
        data.draw(st.lists(st.sampled_from(["live", "selected", "left out"]), min_size=count, max_size=count))
        for count in (full_blocks(request, shape.block_size) for request in batch.requests)
    ]
    batch = sparse(batch, shape, fates)
    assert_is_oracle(batch, attend(batch, implementation.plan(batch.parts, shape.block_size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("pattern", [["selected"], ["live", "left out", "selected"]])
def test_cache_types_and_head_ratios(dtype: torch.dtype, heads: int, kv_heads: int, pattern: list[str]) -> None:
    """covers: C15. With every full block selected the result is the dense one."""
    shape = Shape(heads=heads, kv_heads=kv_heads, dim=32, value_dim=32, dtype=dtype)
    batch = sparse(build(MIXED, shape), shape, all_fates(MIXED, shape.block_size, pattern))
    assert_is_oracle(batch, attend(batch, implementation.plan(batch.parts, shape.block_size)))


@pytest.mark.parametrize("row_tile", [2, 64])
@pytest.mark.parametrize("token_tile", [4, 9, 1024])
def test_any_tiling_is_the_same(monkeypatch: pytest.MonkeyPatch, row_tile: int, token_tile: int) -> None:
    monkeypatch.setattr(native_jobs, "ROW_TILE", row_tile)
    monkeypatch.setattr(native_jobs, "TOKEN_TILE", token_tile)
    shape = Shape()
    batch = sparse(build(MIXED, shape), shape, all_fates(MIXED, 4, ["selected", "live", "left out"]))
    assert_is_oracle(batch, attend(batch, implementation.plan(batch.parts, shape.block_size)))


def test_every_layer_brings_its_blocks_to_one_plan() -> None:
    """The plan's own blocks are used again once a layer brings none."""
    shape = Shape()
    patterns = (["selected", "left out"], ["left out", "selected"], ["selected", "left out"])
    requests = [Request(31, 1), Request(32, 4)]
    layers = [sparse(build(requests, shape), shape, all_fates(requests, 4, pattern)) for pattern in patterns]
    first = layers[0].parts.selected
    assert first is not None
    plan = implementation.plan(layers[0].parts, shape.block_size)
    for layer in layers:
        assert layer.parts.selected is not None
        assert layer.parts.selected.blocks.shape == first.blocks.shape
        assert_is_oracle(layer, attend(layer, plan, blocks_in_order(layer.parts.selected, first)))
    assert_is_oracle(layers[0], attend(layers[0], plan))


def blocks_in_order(part: SelectedPart, like: SelectedPart) -> Tensor:
    """The part's blocks at the entries where `like` has blocks of the same span."""
    blocks = part.blocks.clone()
    for span in part.spans.unique():
        blocks[(like.spans == span) & (like.hi > 0)] = part.blocks[(part.spans == span) & (part.hi > 0)]
    return blocks


def test_a_verification_reads_its_blocks_once() -> None:
    """All rows of a span, its drafts and its live blocks are one job; a decode's blocks are one, too."""
    requests = [Request(31, 1), Request(26, 5)]
    shape = Shape(pads=1)
    batch = sparse(build(requests, shape), shape, all_fates(requests, 4, ["live", "selected", "left out"]))
    jobs = implementation.plan(batch.parts, shape.block_size).jobs
    assert jobs.partials == 0
    spans = [(row_hi - row_lo, span_hi - span_lo) for row_lo, row_hi, span_lo, span_hi, _ in jobs.jobs.tolist()]
    assert sorted(spans) == [(1, 6), (5, 5)]


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_a_selected_block_outside_of_the_cache_is_refused(bad: int) -> None:
    """covers: C13. Also -1, which pads rankings of too few candidates; a pad's block is not looked at."""
    shape = Shape()
    batch = sparse(build([Request(31, 1)], shape), shape, [["selected"] * 8])
    plan = implementation.plan(batch.parts, shape.block_size)
    assert batch.parts.selected is not None
    blocks = batch.parts.selected.blocks.clone()
    blocks[0] = blocks[-1] = bad
    attend(batch, plan, blocks)
    blocks[PADS] = bad
    with pytest.raises(IndexError, match="or of selected_blocks is outside of the cache, which has"):
        attend(batch, plan, blocks)


@pytest.mark.parametrize(
    "change", [lambda blocks: blocks[1:], lambda blocks: blocks.int(), lambda blocks: blocks[None]]
)
def test_other_tensors_than_planned_are_refused(change: object) -> None:
    """covers: C15."""
    shape = Shape()
    batch = sparse(build([Request(31, 1)], shape), shape, [["selected"] * 8])
    plan = implementation.plan(batch.parts, shape.block_size)
    assert batch.parts.selected is not None
    assert callable(change)
    with pytest.raises(ValueError, match=r"expected int64 \(14,\) on cpu"):
        attend(batch, plan, change(batch.parts.selected.blocks))


def test_a_part_of_pads_alone_changes_nothing() -> None:
    """Bit for bit: the jobs are the dense ones."""
    shape = Shape()
    batch = build(MIXED, shape)
    dense = attend(batch, implementation.plan(batch.parts, shape.block_size))
    padded = sparse(batch, shape, [[] for _ in batch.requests])
    assert torch.equal(attend(padded, implementation.plan(padded.parts, shape.block_size)), dense)


def test_what_is_selected_and_not_finite_is_reported() -> None:
    """covers: D8. The reference then says what the row becomes."""
    shape = Shape()
    batch = sparse(build([Request(31, 1)], shape), shape, [["left out"] * 7 + ["selected"]])
    plan = implementation.plan(batch.parts, shape.block_size)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    attend(batch, plan)
    batch.value_cache[batch.tables[0][7], 2] = math.nan
    assert not implementation.attend(*tensors, plan, batch.scale, torch.empty_like(batch.query))


def test_without_kernels_the_reference_is_asked() -> None:
    shape = Shape(poison=0.0)
    batch = sparse(build(MIXED, shape), shape, all_fates(MIXED, 4, ["selected"]))
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    assert not cpu.attend(*tensors, cpu.plan(batch.parts, 4), batch.scale, torch.empty_like(batch.query))


def test_parts_of_the_test_are_what_they_say() -> None:
    """Nothing is seen twice: what is selected is neither shared nor unique any more."""
    shape = Shape()
    batch = sparse(build(MIXED, shape), shape, all_fates(MIXED, 4, ["selected"]))
    shared, unique = batch.parts.shared, batch.parts.unique
    assert isinstance(shared, SharedPart)
    assert isinstance(unique, UniquePart)
    assert not (shared.hi == shape.block_size).any()
    assert not (unique.hi == shape.block_size).any()
