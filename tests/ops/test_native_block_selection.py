"""Scores and choice of blocks in C++ are those of the reference, garbage and pads included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.api import new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl import reference
from vllm_gaudi_ucm.ops.block_selection.impl.cpu import native as implementation
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())

COVERED = list(SummaryKind)
FLOATS = [kind for kind in COVERED if not kind.is_coded]
NUM_BLOCKS, BLOCK_SIZE = 40, 21


def task(
    kind: SummaryKind, rows: list[int], counts: list[int], dim: int, heads: int = 6, kv_heads: int = 2, seed: int = 0
) -> list[Tensor]:
    """query, summaries, blocks, spans, first_rows, num_rows; the last span is that of the pads and has no rows."""
    random = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(sum(rows) + 1, heads, dim, generator=random)
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim, generator=random)
    summaries = new_summaries(cache, kind)
    write_summaries(cache, torch.arange(NUM_BLOCKS), summaries, kind)
    summaries[0] = 255 if kind.is_coded else math.nan
    spans = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    blocks = torch.randint(1, NUM_BLOCKS, (len(spans),), generator=random)
    order = torch.randperm(len(spans), generator=random)
    pads = torch.full((3,), len(rows))
    num_rows = torch.tensor([*rows, 0])
    first_rows = num_rows.cumsum(0) - num_rows
    blocks, spans = torch.cat((blocks[order], pads * 0)), torch.cat((spans[order], pads))
    return [query, summaries, blocks, spans, first_rows, num_rows]


def both(tensors: list[Tensor], kind: SummaryKind) -> tuple[Tensor, Tensor]:
    num_rows = tensors[-1]
    expected = reference.scores(*tensors, int(num_rows.max().clamp(min=1)), 0.25, kind)  # type: ignore[arg-type]
    found = implementation.scores(*tensors, 0.25, kind)  # type: ignore[arg-type]
    assert found is not None
    return found, expected


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(COVERED),
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=5),
    dim=st.sampled_from([16, 20, 64]),
    ratio=st.sampled_from([(6, 2), (4, 4), (9, 3), (3, 1)]),
    seed=st.integers(0, 9),
)
def test_scores_are_those_of_the_reference(
    kind: SummaryKind, spans: list[tuple[int, int]], dim: int, ratio: tuple[int, int], seed: int
) -> None:
    """covers: C15, C16. Rows, head ratios, ragged spans, spans without blocks or rows, and pads of NaN."""
    rows, counts = (list(column) for column in zip(*spans, strict=True))
    found, expected = both(task(kind, rows, counts, dim, *ratio, seed), kind)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", COVERED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 20])
def test_half_precision_and_strided_queries(kind: SummaryKind, dtype: torch.dtype, dim: int) -> None:
    tensors = task(kind, [1, 4], [30, 17], dim)
    wide = torch.zeros(tensors[0].shape[0], 2 * 6, dim)
    wide[:, 3:9] = tensors[0]
    tensors[0] = wide[:, 3:9]
    if not kind.is_coded:
        tensors[1] = tensors[1].to(dtype)
    torch.testing.assert_close(*both(tensors, kind), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["box", "block", "row"])
def test_what_is_not_finite_is_not_overlooked(kind: SummaryKind, bad: float, where: str) -> None:
    """covers: D8. A broken block has score 1 and takes nothing from the others; a broken row breaks its span alone."""
    tensors = task(kind, [1, 3], [20, 20], 16)
    query, summaries, blocks = tensors[:3]
    if where == "row":
        query[2, 1, 3] = bad
    else:
        summaries[blocks[5], 0 if where == "box" else slice(None), 1, 2] = bad
    torch.testing.assert_close(*both(tensors, kind), rtol=2e-5, atol=1e-6)


def test_what_the_kernels_do_not_cover() -> None:
    """Then the reference is asked."""
    tensors = task(SummaryKind.MEAN, [1], [4], 16)
    tensors[1] = torch.randn(4, 2, NUM_BLOCKS, 16).permute(2, 0, 1, 3)
    assert implementation.scores(*tensors, 1.0, SummaryKind.MEAN) is None


@pytest.mark.parametrize(
    ("which", "value"), [(2, NUM_BLOCKS), (2, -1), (3, 2), (3, -1), (4, 2), (4, -1)], ids=lambda value: str(value)
)
def test_ids_outside_of_their_tensors_are_refused(which: int, value: int) -> None:
    """covers: C13."""
    tensors = task(SummaryKind.MEAN, [1], [4], 16)
    tensors[which][0] = value
    with pytest.raises(IndexError, match="outside of 40 blocks, 2 spans or 2 rows"):
        implementation.scores(*tensors, 1.0, SummaryKind.MEAN)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0, -2.0, 1e-30, math.nan, math.inf, -math.inf]), max_size=40),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(0, 33),
    st.randoms(use_true_random=False),
)
def test_the_choice_is_that_of_the_reference(
    values: list[float], spans: int, width: int, most: int, random: object
) -> None:
    """covers: C13, C18. Ties by number, NaN first, fewer candidates than asked for, some that may not be chosen."""
    values = values[: spans * width]
    places = random.sample(range(spans * width), len(values))  # type: ignore[attr-defined]
    values, places = [*values, 9.0, math.nan], torch.tensor([*places, spans * width, spans * width])
    scores = torch.tensor(values)
    found = implementation.choose(scores, places, spans, width, most)
    assert found is not None
    assert torch.equal(found, reference.choose(scores, places, spans, width, most))


@pytest.mark.parametrize("place", [-1, 7])
def test_a_place_outside_of_the_table_is_refused(place: int) -> None:
    """covers: C13."""
    with pytest.raises(IndexError, match="outside of 0 to 6, of 2 x 3 blocks"):
        implementation.choose(torch.ones(2), torch.tensor([0, place]), 2, 3, 2)
