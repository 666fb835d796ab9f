"""The hpu implementation beyond what every one is tested for: its products, compiled graphs, the selected part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.batch import Request, Shape, build, sparse_requests_strategy
from tests.ops.oracle import assert_matches, attend
from vllm_gaudi_ucm.ops.unified_attention.api import (
    choose_implementation,
    choose_static_implementation,
    prepare,
    unified_attention,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import rows as hpu_rows
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import Products
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.rows import Chunk, chunks
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm_tools.op_cost.operator_cost import trace

pytestmark = pytest.mark.slow  # large batches in tiles

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


@given(
    requests=sparse_requests_strategy(block_size=4),
    seed=st.integers(0, 10_000),
    loose=st.booleans(),
    contiguous=st.booleans(),
    least=st.sampled_from([1, 2, 3]),
)
@settings(COMMON, max_examples=120)
def test_many_chunks_equal_the_oracle(
    requests: list[Request], seed: int, loose: bool, contiguous: bool, least: int
) -> None:
    """covers: A1 A2 A9 A11 A14 A15. Every part, chosen blocks too, in chunks of a few rows."""
    batch = build(requests, Shape(seed=seed, loose=loose, contiguous=contiguous))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hpu_rows, "LEAST_ROWS", least)
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


@pytest.mark.parametrize("before", [0, 64])
def test_chunks_of_rows(before: int) -> None:
    """covers: A15. Each row once; keys from the first that a slice names, none later than the chunk."""
    slices = tuple(CausalSlice(lo, lo + 100, max(0, lo - 300), lo + 100) for lo in range(0, 1000, 100))
    part = CausalPart(torch.zeros(1000, dtype=torch.int32), slices)
    firsts = (0, 0, 200, 400) if before == 0 else (0, 0, 0, 0)
    ends = (250, 500, 750, 1000)
    expected = [Chunk(hi - 250, hi, first, before + hi) for hi, first in zip(ends, firsts, strict=True)]
    assert chunks(1000, before, part, 4) == expected
    assert chunks(100, 64, None, 4) == [Chunk(0, 100, 0, 64)]


def test_slices_of_unequal_lengths_and_gaps_between_them() -> None:
    """Rows outside of every slice are written, too."""
    batch = build([Request(0, 7), Request(0, 9)], Shape(pads=4))
    assert batch.parts.causal is not None
    slices = (CausalSlice(0, 7, 0, 7), CausalSlice(7, 16, 7, 16))
    assert_matches(replace(batch, parts=AttentionParts(CausalPart(batch.parts.causal.groups, slices))), "hpu")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_one_graph_of_a_compiler(backend: str, contiguous: bool) -> None:
    """covers: B1. Nothing is read on the host, and no shape depends on data."""
    batch = build([*MIXED, Request(6, 3, chosen=frozenset({0}))], Shape(poison=1e4, contiguous=contiguous))
    parts = prepare(batch.parts, batch.key_cache.shape[1], implementation="hpu")
    torch._dynamo.reset()
    compiled = torch.compile(unified_attention, backend=backend, fullgraph=True, dynamic=False)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache, parts, batch.spec)
    torch.testing.assert_close(compiled(*tensors), unified_attention(*tensors))


def test_ranges_that_begin_at_0_need_no_lower_bound() -> None:
    batch = build(MIXED, Shape())
    shared, unique = batch.parts.shared, batch.parts.unique
    assert shared is not None
    assert unique is not None
    said = batch.parts._replace(shared=shared._replace(from_first=True), unique=unique._replace(from_first=True))
    assert torch.equal(attend(replace(batch, parts=said), "hpu"), attend(batch, "hpu"))


def test_scores_are_float32() -> None:
    """bfloat16 would be off by up to 2^-9 of a score; a float32 sum of dim terms is off by dim * 2^-24 of these."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 64, 128, generator=random).bfloat16() * 2 for _ in range(2))
    products = Products.from_query(query, key, AttentionSpec(1.0))
    found = products.scores(products.query(query[0].transpose(0, 1), 1)[0].transpose(0, 1), products.key(key[0]))
    exact = query[0].double() @ key[0].double().transpose(1, 2)
    terms = query[0].abs().double() @ key[0].abs().double().transpose(1, 2)
    assert found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= 128 * 2**-24 * terms).all()
    assert (exact - exact.bfloat16().double()).abs().max() > 100 * (found.double() - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_values_are_multiplied_in_their_own_dtype(dtype: torch.dtype) -> None:
    """bfloat16 values go to the matrix engine as they are; scores are float32."""
    batch = build(MIXED, Shape(dtype=dtype))
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    found: list[torch.dtype] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.bmm.default:
                found.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Made():
        unified_attention(*tensors, batch.parts, batch.spec, implementation="hpu")
    assert found.count(dtype) in (len(found) // 2, len(found))
    assert set(found) == {dtype, torch.float32}


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


def test_the_choice_for_gaudi() -> None:
    assert choose_implementation("auto", "hpu") == "hpu"
    assert choose_static_implementation("auto", "hpu") == "hpu"
    assert choose_static_implementation("hpu", "cpu") == "hpu"
    assert choose_static_implementation("reference", "hpu") == "reference"
    for refused in ("cpu", "native"):
        with pytest.raises(ValueError, match="which a captured graph cannot do; choose one of auto, reference"):
            choose_static_implementation(refused, "cpu")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        choose_static_implementation("fast", "hpu")
