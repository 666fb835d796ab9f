"""Block selection on CUDA. Runs on a GPU, or on a CPU in the process of test_interpreter.py."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.launches import Launches
from tests.ops.oracle import CUDA_RUNS, examples
from tests.ops.selection import Candidates, Case, build, expected_scores
from tests.ops.test_block_selection import COMMON, assert_scores, cases
from tests.ops.test_block_selection_choice import SCORES
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, choose_blocks, keep_or_replace
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl import cuda
from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COVERED = (SummaryKind.MEAN, SummaryKind.MINMAX, SummaryKind.BOX_MEAN)


def moved(candidates: Candidates) -> Candidates:
    found = {one.name: getattr(candidates, one.name) for one in fields(candidates)}
    return replace(candidates, **{k: v.to(DEVICE) for k, v in found.items() if isinstance(v, Tensor)})


def scores(candidates: Candidates, kind: SummaryKind) -> Tensor:
    return moved(candidates).scores(kind, implementation="cuda").cpu()


@pytest.mark.parametrize("kind", COVERED)
@given(case=cases())
@settings(COMMON, max_examples=examples(60))
def test_scores_equal_their_definition(kind: SummaryKind, case: Case) -> None:
    """covers: C13, C14, C15, C16. Rows of mixed batches, spans of several rows, any GQA ratio, poisoned pads."""
    candidates = build(case)
    found = scores(candidates, kind)
    assert_scores(found, expected_scores(candidates, kind))
    assert not found[found.shape[0] - case.pads :].any(), "a pad has no score"


@pytest.mark.parametrize("kind", COVERED)
def test_more_candidates_than_programs_look_at_at_once(kind: SummaryKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans whose candidates begin and end anywhere in a tile, of many lines."""
    monkeypatch.setattr(cuda, "LOOKED_AT", 32)
    monkeypatch.setattr(cuda, "NEIGHBOURS", 16)
    monkeypatch.setattr(cuda, "SHARED_LINES", 8)
    candidates = build(Case(spans=((1, 30), (2, 41), (1, 3)), heads=6, kv_heads=2))
    assert_scores(scores(candidates, kind), expected_scores(candidates, kind))


def test_the_rows_of_a_long_prompt_are_a_grid_that_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a prompt may choose blocks, too: 8192 rows of 64 heads, in lines of four."""
    from vllm_gaudi_ucm.ops.block_selection.impl.triton import selection as kernels

    launches = {name: Launches() for name in ("estimate_blocks", "span_sums", "block_shares")}
    for name, kernel in launches.items():
        monkeypatch.setattr(kernels, name, kernel)
    query, summaries = torch.empty(8192, 64, 8, device="meta"), torch.empty(9, 2, 8, 8, device="meta")
    ids = torch.empty(4, dtype=torch.int64, device="meta")
    BLOCK_SELECTION.make("cuda").scores(query, summaries, ids, ids, ids, ids, 8192, 1.0, SummaryKind.MEAN)
    for kernel in launches.values():
        kernel.assert_allowed()


@pytest.mark.parametrize("kind", COVERED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(kind: SummaryKind, dtype: torch.dtype) -> None:
    candidates = build(Case(dtype=dtype))
    np.testing.assert_allclose(scores(candidates, kind), expected_scores(candidates, kind), atol=0.02, rtol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", COVERED)
def test_a_broken_block_comes_first_and_disturbs_no_other(kind: SummaryKind, bad: float) -> None:
    """covers: A9. Its score is 1; the others' are as the reference has them."""
    candidates = moved(build(Case()))
    summaries = candidates.summaries(kind)
    summaries[candidates.blocks[2]] = bad
    found, expected = (
        candidates.scores(kind, summaries=summaries, implementation=name).cpu() for name in ("cuda", "reference")
    )
    assert found[2] == 1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_what_is_not_covered_is_answered_by_the_reference() -> None:
    """Codes, and heads that are strided in memory."""
    candidates = moved(build(Case()))
    found = candidates.scores(SummaryKind.HASH, implementation="cuda")
    torch.testing.assert_close(found, candidates.scores(SummaryKind.HASH))
    wide = torch.zeros(*candidates.query.shape, 2, dtype=candidates.query.dtype, device=DEVICE)
    wide[..., 0] = candidates.query
    strided = replace(candidates, query=wide[..., 0])
    found = strided.scores(SummaryKind.MEAN, implementation="cuda")
    torch.testing.assert_close(found, candidates.scores(SummaryKind.MEAN))


def test_no_candidates() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    query, summaries = torch.zeros(1, 2, 4, device=DEVICE), torch.zeros(3, 1, 2, 4, device=DEVICE)
    found = block_scores(query, summaries, none, none, none, none, 1, 0.5, SummaryKind.MEAN, implementation="cuda")
    assert found.shape == (0,)


@given(data=st.data(), num_spans=st.integers(0, 4), width=st.integers(0, 9), most=st.integers(0, 12))
@settings(COMMON, max_examples=examples(100))
def test_choice_equals_the_reference(data: st.DataObject, num_spans: int, width: int, most: int) -> None:
    """covers: C13. Ties, infinities and what is no number, spans with fewer candidates than are asked for."""
    values = st.one_of(SCORES, st.just(float("nan")), st.just(-0.0))
    places = data.draw(st.lists(st.integers(0, max(0, num_spans * width - 1)), unique=True)) if width else []
    entries = [(place, data.draw(values)) for place in places if place < num_spans * width]
    entries += [(num_spans * width, data.draw(values)) for _ in range(data.draw(st.integers(0, 3)))]
    ids = torch.tensor([place for place, _ in entries], dtype=torch.int64, device=DEVICE)
    given_scores = torch.tensor([score for _, score in entries], dtype=torch.float32, device=DEVICE)
    found, expected = (
        choose_blocks(given_scores, ids, num_spans, width, most, implementation=name) for name in ("cuda", "reference")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [63, 64, 65, 300])
def test_a_choice_among_many(width: int) -> None:
    """covers: C13. More blocks than a program ranks, few distinct scores."""
    random = torch.Generator().manual_seed(width)
    numbers = torch.randint(0, 20, (3 * width,), generator=random).to(DEVICE).bfloat16()
    places = torch.randperm(3 * width, generator=random).to(DEVICE)
    found, expected = (
        choose_blocks(numbers, places, 3, width, 40, implementation=name) for name in ("cuda", "reference")
    )
    assert torch.equal(found, expected)


@given(data=st.data(), spans=st.integers(0, 4), most=st.integers(0, 40), width=st.integers(1, 12))
@settings(COMMON, max_examples=examples(100))
def test_keep_or_replace_equals_the_reference(data: st.DataObject, spans: int, most: int, width: int) -> None:
    """Entries that are no block, blocks named twice, every mode and threshold."""
    entry = st.integers(-1, width)

    def drawn(values: st.SearchStrategy[int], *shape: int) -> Tensor:
        count = int(np.prod(shape))
        numbers = data.draw(st.lists(values, min_size=count, max_size=count))
        return torch.tensor(numbers, dtype=torch.int64, device=DEVICE).view(shape)

    rankings = [drawn(entry, spans, most) for _ in range(2)]
    rest = [drawn(st.integers(0, top), spans) for top in (most, 2, 8)]
    found, expected = (keep_or_replace(*rankings, *rest, width, implementation=name) for name in ("cuda", "reference"))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
