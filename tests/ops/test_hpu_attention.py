"""The hpu implementation beyond what every one is tested for: many tiles, its operators, the selected part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.batch import Request, Shape, build, sparse_requests_strategy
from tests.ops.oracle import assert_matches, attend, budget, oracle
from vllm_gaudi_ucm.graphs.operator_cost import trace
from vllm_gaudi_ucm.ops.unified_attention.api import (
    choose_implementation,
    choose_static_implementation,
    prepare,
    unified_attention,
)
from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_causal import Rows, causal_tiles
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice

COMMON = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(5, 3, family=1, prefix=1),
    Request(0, 11),
    Request(14, 4),
    Request(3, 1),
]


@contextmanager
def small_tiles(tile: int = 2) -> Iterator[None]:
    """Tiles of a few rows, tokens and blocks, so that small batches have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hpu_tile, "TILE", tile)
        patch.setattr(hpu_tile, "SCORE_BYTES", 4 * 4 * tile * 4 * tile)
        patch.setattr(hpu_tile, "KV_BYTES", 1 << 10)
        patch.setattr(hpu_tile, "SLICE_BYTES", 1 << 10)
        patch.setattr(hpu_tile, "PIECE_BYTES", 1 << 10)
        patch.setattr(hpu_tile, "MOST_ROWS", 2 * tile)
        yield


@given(
    requests=sparse_requests_strategy(block_size=4),
    seed=st.integers(0, 10_000),
    loose=st.booleans(),
    contiguous=st.booleans(),
    tile=st.sampled_from([1, 2, 3]),
)
@settings(COMMON, max_examples=120)
def test_many_tiles_equal_the_oracle(
    requests: list[Request], seed: int, loose: bool, contiguous: bool, tile: int
) -> None:
    """covers: A1 A2 A9 A11 A14 A15. Every part, chosen blocks too, cut wherever it can be."""
    batch = build(requests, Shape(seed=seed, loose=loose, contiguous=contiguous))
    with small_tiles(tile):
        assert_matches(batch, "hpu")


@given(
    requests=sparse_requests_strategy(block_size=4),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    poison=st.sampled_from([float("nan"), float("inf"), 1e4]),
)
@settings(COMMON, max_examples=80)
def test_selected_blocks(requests: list[Request], seed: int, dtype: torch.dtype, poison: float) -> None:
    """covers: C16. Garbage beyond a span's rows, in pads and in blocks that were not chosen stays out."""
    assert_matches(build(requests, Shape(seed=seed, dtype=dtype, poison=poison)), "hpu")


def test_a_broken_selected_token_breaks_its_own_rows_only() -> None:
    """covers: C16. The rows that a span of one row shares a tile with belong to others."""
    requests = [Request(9, 1, chosen=frozenset({0})), Request(8, 5, chosen=frozenset({1}))]
    batch = build(requests, Shape(poison=0.0))
    expected = attend(batch, "hpu")
    batch.value_cache[batch.tables[0][0], 1] = float("nan")
    out = attend(batch, "hpu")
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], expected[1:])


def test_another_choice_of_a_layer() -> None:
    batch = build([Request(12, 1, chosen=frozenset({0}))], Shape(poison=0.0))
    assert batch.parts.selected is not None
    other = torch.where(batch.parts.selected.hi > 0, batch.tables[0][1], batch.parts.selected.blocks)
    expected = attend(batch, "reference", selected_blocks=other)
    torch.testing.assert_close(attend(batch, "hpu", selected_blocks=other), expected)
    assert not torch.equal(attend(batch, "hpu"), expected)


@pytest.mark.parametrize("length", [3, 8, 130, 700])
@pytest.mark.parametrize("count", [1, 5])
def test_packed_prompts_are_never_multiplied_with_each_other(length: int, count: int) -> None:
    """covers: A15. Equal prompts side by side: exact, and each key is of the prompt's own."""
    requests = [Request(0, length)] * count
    batch = build(requests, Shape(pads=0, heads=2, kv_heads=1))
    assert_matches(batch, "hpu")
    part = batch.parts.causal
    assert part is not None
    whole = CausalPart(
        part.groups,
        tuple(CausalSlice(n * length, (n + 1) * length, n * length, (n + 1) * length) for n in range(count)),
    )
    assert_matches(replace(batch, parts=AttentionParts(whole)), "hpu")
    rows_seen = torch.zeros(count * length, dtype=torch.int64)
    for tile in causal_tiles(whole, batch.key, batch.value, 2, 0):
        rows = tile.rows.of(part.groups)
        rows_seen[tile.rows.of(torch.arange(count * length)).flatten()] += 1
        for keys in tile.keys:
            assert (keys.of(part.groups)[:, None] == rows[:, :1, None]).all()
    assert (rows_seen == 1).all(), "each row in exactly one tile"


def test_rows_of_adjacent_slices() -> None:
    numbers = torch.arange(20)
    assert Rows(2, 3, 5, 1, 4).of(numbers).tolist() == [[3, 4, 5], [8, 9, 10], [13, 14, 15]]
    assert Rows(2, 3, 5, 1, 4).end == 16
    assert Rows(0, 1, 0, 4, 6).of(numbers).tolist() == [[4, 5]]


def test_slices_of_unequal_lengths_and_gaps_between_them() -> None:
    """Rows outside of every slice are written too; a slice whose keys lie behind its first rows leaves those empty."""
    batch = build([Request(0, 7), Request(0, 9)], Shape(pads=4))
    assert batch.parts.causal is not None
    slices = (CausalSlice(0, 7, 0, 7), CausalSlice(7, 16, 7, 16))
    assert_matches(replace(batch, parts=AttentionParts(CausalPart(batch.parts.causal.groups, slices))), "hpu")
    behind = (CausalSlice(0, 7, 0, 7), CausalSlice(7, 9, 9, 16), CausalSlice(9, 16, 7, 16))
    parts = AttentionParts(CausalPart(batch.parts.causal.groups, behind))
    with small_tiles():
        out = attend(replace(batch, parts=parts), "hpu")
    assert not out[7:9].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_run_in_the_tensors_own_dtype(dtype: torch.dtype) -> None:
    """bfloat16 goes to the matrix engine as it is."""
    batch = build(MIXED, Shape(dtype=dtype))
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    found: list[torch.dtype] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.bmm.default:
                found.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        unified_attention(*tensors, batch.parts, batch.spec, implementation="hpu")
    assert set(found) == {dtype}


def test_operators_do_not_depend_on_data() -> None:
    """covers: B1. Two steps of the same shapes are one graph."""
    first, second = (
        trace(unified_attention, b.query, b.key, b.value, b.key_cache, b.value_cache, ready, b.spec)
        for b in (build(MIXED, Shape(seed=seed)) for seed in (1, 2))
        for ready in [prepare(b.parts, 4, implementation="hpu")]
    )
    assert first.operations
    assert first.operations == second.operations


def test_repeats_are_equal_to_the_last_bit() -> None:
    batch = build(MIXED, Shape(dtype=torch.bfloat16))
    assert torch.equal(attend(batch, "hpu"), attend(batch, "hpu"))


def test_tiles_change_nothing_beyond_the_budget() -> None:
    batch = build([Request(700, 1), Request(40, 300, prefix=2), Request(0, 90)], Shape(block_size=16))
    plain = attend(batch, "hpu")
    with small_tiles(8):
        tiled = attend(batch, "hpu")
    assert np.abs((tiled - plain).double().numpy()).max() <= budget(batch, oracle(batch))


def test_the_choice_for_gaudi() -> None:
    assert choose_implementation("auto", "hpu") == "hpu"
    assert choose_static_implementation("auto", "hpu") == "hpu"
    assert choose_static_implementation("hpu", "cpu") == "hpu"
    assert choose_static_implementation("reference", "hpu") == "reference"
    for refused in ("cpu", "native"):
        with pytest.raises(ValueError, match="which a graph excludes; choose one of auto, reference"):
            choose_static_implementation(refused, "cpu")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        choose_static_implementation("fast", "hpu")
