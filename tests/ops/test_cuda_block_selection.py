"""Block selection on CUDA. Runs on a GPU, or on a CPU in the process of test_interpreter.py."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.block_selection import COMMON, assert_scores, cases
from tests.ops.block_selection_choice import SCORES
from tests.ops.launches import Launches
from tests.ops.oracle import CUDA_RUNS, examples
from tests.ops.selection import Candidates, Case, build, expected_scores, may_round_differently
from vllm_gaudi_ucm.ops.block_selection.api import (
    block_scores,
    choose_blocks,
    keep_or_replace,
    new_summaries,
    prepare_spans,
    rank_and_take,
    take_choice,
    write_summaries,
)
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import fused as cuda_fused
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import selection as cuda
from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION, ChoosingSpans, TicketedRanges
from vllm_gaudi_ucm.ops.selected_list import SelectedList

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLEMENTATIONS = ("cuda", "cuda_fused")
COVERED = tuple(SummaryKind)
FLOATS = tuple(kind for kind in COVERED if not kind.is_coded)


def moved(candidates: Candidates) -> Candidates:
    found = {one.name: getattr(candidates, one.name) for one in fields(candidates)}
    return replace(candidates, **{k: v.to(DEVICE) for k, v in found.items() if isinstance(v, Tensor)})


def scores(candidates: Candidates, kind: SummaryKind, name: str = "cuda") -> Tensor:
    return moved(candidates).scores(kind, implementation=name).cpu()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", COVERED)
@given(case=cases())
@settings(COMMON, max_examples=examples(60))
def test_scores_equal_their_definition(name: str, kind: SummaryKind, case: Case) -> None:
    """covers: C13, C14, C15, C16. Rows of mixed batches, spans of several rows, any GQA ratio, poisoned pads."""
    candidates = build(case)
    assume(not kind.is_coded or not may_round_differently(candidates, kind))
    found = scores(candidates, kind, name)
    assert_scores(found, expected_scores(candidates, kind))
    on_device = moved(candidates)
    prepared = on_device.scores(kind, implementation=name, prepared=on_device.prepare(name))
    assert torch.equal(prepared.cpu(), found)
    assert not found[found.shape[0] - case.pads :].any(), "a pad has no score"


@pytest.mark.parametrize("kind", [kind for kind in SummaryKind if kind.is_coded])
@pytest.mark.parametrize("dim", [136, 256])
def test_large_heads_are_rotated_piece_by_piece(kind: SummaryKind, dim: int) -> None:
    """The last piece of 136 elements is smaller."""
    candidates = build(Case(spans=((1, 5), (2, 4)), dim=dim, seed=7))
    assert not may_round_differently(candidates, kind)
    assert_scores(scores(candidates, kind), expected_scores(candidates, kind))


@pytest.mark.parametrize("kind", FLOATS)
def test_more_candidates_than_programs_look_at_at_once(kind: SummaryKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans whose candidates begin and end anywhere in a tile, of many lines."""
    monkeypatch.setattr(cuda, "LOOKED_AT", 32)
    monkeypatch.setattr(cuda, "NEIGHBOURS", 16)
    monkeypatch.setattr(cuda, "SHARED_LINES", 8)
    monkeypatch.setattr(cuda_fused, "PARTS", 2)
    monkeypatch.setattr(cuda_fused, "RANKED_BY", 16)
    monkeypatch.setattr(cuda_fused, "SHARED_LINES", 8)
    monkeypatch.setattr(cuda_fused, "STREAMED_WIDE", 16)
    candidates = build(Case(spans=((1, 30), (2, 41), (1, 3)), heads=6, kv_heads=2))
    for name in IMPLEMENTATIONS:
        assert_scores(scores(candidates, kind, name), expected_scores(candidates, kind))


def test_what_is_too_large_to_be_streamed_is_scored_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a long prompt, and more spans than a program counts."""
    candidates, kind = build(Case(spans=((1, 30), (2, 41), (1, 3)), heads=6, kv_heads=2)), SummaryKind.BOX_MEAN
    expected = scores(candidates, kind)
    for name in ("MOST_LINES", "FEW_LINES", "MOST_SPANS"):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_fused, name, 2)
            assert torch.equal(scores(candidates, kind, "cuda_fused"), expected)


def test_the_rows_of_a_long_prompt_are_a_grid_that_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a prompt may choose blocks, too: 8192 rows of 64 heads, in lines of four."""
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import scores as kernels

    launches = {name: Launches() for name in ("estimate_boxes", "find_candidates", "span_sums", "block_shares")}
    for name, kernel in launches.items():
        monkeypatch.setattr(kernels, name, kernel)
    query, summaries = torch.empty(8192, 64, 8, device="meta"), torch.empty(9, 2, 8, 8, device="meta")
    ids = torch.empty(4, dtype=torch.int64, device="meta")
    BLOCK_SELECTION.make("cuda").scores(query, summaries, ids, ids, ids, ids, 8192, 1.0, SummaryKind.MEAN)
    for kernel in launches.values():
        kernel.assert_allowed()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", COVERED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(name: str, kind: SummaryKind, dtype: torch.dtype) -> None:
    candidates = build(Case(dtype=dtype))
    np.testing.assert_allclose(scores(candidates, kind, name), expected_scores(candidates, kind), atol=0.02, rtol=0.05)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", FLOATS)
def test_a_broken_block_comes_first_and_disturbs_no_other(name: str, kind: SummaryKind, bad: float) -> None:
    """covers: A9. Its score is 1; the others' are as the reference has them."""
    candidates = moved(build(Case()))
    summaries = candidates.summaries(kind)
    summaries[candidates.blocks[2]] = bad
    found, expected = (
        candidates.scores(kind, summaries=summaries, implementation=by).cpu() for by in (name, "reference")
    )
    assert found[2] == 1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_what_is_not_covered_is_answered_by_the_reference() -> None:
    """Heads that are strided in memory."""
    candidates = moved(build(Case()))
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
    """covers: C13. More blocks than a program ranks, few distinct scores; spans one behind the other, or mixed up."""
    random = torch.Generator().manual_seed(width)
    numbers = torch.randint(0, 20, (3 * width,), generator=random).to(DEVICE).bfloat16()
    places = torch.randperm(3 * width, generator=random).to(DEVICE)
    found, expected = (
        choose_blocks(numbers, places, 3, width, 40, implementation=name) for name in ("cuda", "reference")
    )
    assert torch.equal(found, expected)
    in_order, ones = torch.arange(3 * width, device=DEVICE), torch.ones(3, dtype=torch.int64, device=DEVICE)
    prepared = prepare_spans(in_order // width, ones, ones, 1, ones, ones, 40, implementation="cuda")
    found = choose_blocks(numbers, in_order, 3, width, 40, implementation="cuda", prepared=prepared)
    assert torch.equal(found, choose_blocks(numbers, in_order, 3, width, 40, implementation="reference"))


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


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("block_size", [8, 40])
def test_summaries_equal_the_reference_and_pads_are_not_written(kind: SummaryKind, block_size: int) -> None:
    """Blocks in any order, block sizes that are no power of two, a cache strided as pairs of keys and values."""
    candidates = build(Case(block_size=block_size, dim=24))
    pairs = torch.stack((candidates.key_cache, torch.full_like(candidates.key_cache, float("nan"))), dim=3)
    keys = pairs.to(DEVICE)[:, :, :, 0]
    assert not keys.is_contiguous()
    blocks = candidates.blocks.to(DEVICE)
    real = blocks[blocks > 0]
    found, expected = (torch.full(kind.shape(*keys.shape), float("nan"), device=DEVICE) for _ in range(2))
    write_summaries(keys, blocks, found, kind, implementation="cuda")
    write_summaries(keys, real, expected, kind, implementation="reference")
    assert found[real].isfinite().all()
    torch.testing.assert_close(found, expected, equal_nan=True, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [8, 40])
@pytest.mark.parametrize("dim", [12, 24])
def test_codes_equal_the_reference_and_pads_are_not_written(block_size: int, dim: int) -> None:
    """No byte differs, in blocks and heads whose sizes are no power of two."""
    kind = SummaryKind.CODES
    candidates = build(Case(block_size=block_size, dim=dim, seed=6))
    assert not may_round_differently(candidates, kind)
    candidates = moved(candidates)
    keys, blocks = candidates.key_cache, candidates.blocks
    found, expected = (torch.full_like(new_summaries(keys, kind), 77) for _ in range(2))
    write_summaries(keys, blocks, found, kind, implementation="cuda")
    write_summaries(keys, blocks[blocks > 0], expected, kind, implementation="reference")
    assert torch.equal(found, expected)


def test_pads_alone_write_no_summary() -> None:
    """Most steps fill no block; the keys of the dummy block are anything."""
    keys = torch.full((3, 16, 2, 16), float("nan"), device=DEVICE)
    summaries = torch.ones(SummaryKind.BOX_MEAN.shape(*keys.shape), device=DEVICE)
    write_summaries(
        keys, torch.zeros(4, dtype=torch.int64, device=DEVICE), summaries, SummaryKind.BOX_MEAN, implementation="cuda"
    )
    assert torch.equal(summaries, torch.ones_like(summaries))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_key_breaks_its_summary(kind: SummaryKind, bad: float) -> None:
    """covers: A9. Its block then comes first."""
    candidates = moved(build(Case()))
    candidates.key_cache[candidates.blocks[2], 3] = bad
    summaries = torch.zeros(kind.shape(*candidates.key_cache.shape), device=DEVICE)
    write_summaries(candidates.key_cache, candidates.blocks, summaries, kind, implementation="cuda")
    found = candidates.scores(kind, summaries=summaries, implementation="cuda")
    assert found[2] == 1
    others = torch.cat((found[:2], found[3:]))
    assert others.isfinite().all()
    assert (others < 1).sum() == len(others) - 1, "a span of one candidate gives it all"


@given(data=st.data(), counts=st.lists(st.integers(0, 9), min_size=1, max_size=4), most=st.integers(9, 20))
@settings(COMMON, max_examples=examples(60))
def test_a_choice_is_handed_over_as_the_operations_one_by_one_do(
    data: st.DataObject, counts: list[int], most: int
) -> None:
    """covers: C13. Any mode, stored rankings with holes, pads of the choice, spans that share the last row."""
    spans, width, table_rows = len(counts), 24, 6
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = torch.randperm(table_rows - 1, generator=random)[:spans]
    slots = torch.where(torch.tensor(counts) > 0, rows, table_rows - 1)
    stored = torch.randint(-1, width, (table_rows, most), generator=random)
    fresh = torch.stack([torch.randperm(width, generator=random)[:most] for _ in counts])
    fresh[:, -1] = -1
    if data.draw(st.booleans()):
        stored[slots] = fresh
        stored[:, 1] = stored[:, 0]
    modes = torch.tensor([data.draw(st.integers(0, 2)) for _ in counts])
    thresholds = torch.tensor([data.draw(st.integers(0, 6)) for _ in counts])
    block_table = torch.randint(1, 99, (spans * width + 1,), generator=random)
    of_spans = torch.tensor(counts), modes, thresholds
    ranking, kept, replaced = keep_or_replace(stored[slots], fresh, *of_spans, width, implementation="reference")
    owners = torch.arange(spans).repeat_interleave(torch.tensor(counts))
    ranks = torch.cat([torch.arange(count) for count in counts]).long()
    ids = block_table[owners * width + ranking[owners, ranks].clamp(min=0)]
    pads = data.draw(st.integers(0, 20))
    table, checks = stored.clone().to(DEVICE), torch.tensor([3, 4], device=DEVICE)
    tensors = (slots, *of_spans)
    choosing = ChoosingSpans(
        table, *(one.to(DEVICE) for one in tensors), width, block_table.to(DEVICE), len(ids) + pads, checks
    )
    chosen, found = take_choice(fresh.to(DEVICE), choosing, implementation="cuda")
    assert torch.equal(chosen.cpu(), ranking)
    assert torch.equal(found.cpu(), torch.cat((ids, torch.zeros(pads, dtype=torch.int64))))
    assert checks.tolist() == [3 + int(kept.sum()), 4 + int(replaced.sum())]
    real = torch.tensor(counts) > 0
    assert torch.equal(table.cpu()[slots[real]], ranking[real])
    others = [row for row in range(table_rows - 1) if row not in slots.tolist()]
    assert torch.equal(table.cpu()[others], stored[others])


@given(data=st.data(), counts=st.lists(st.integers(0, 9), min_size=1, max_size=4), most=st.integers(9, 20))
@settings(COMMON, max_examples=examples(60))
def test_a_choice_in_one_launch_is_that_of_two(data: st.DataObject, counts: list[int], most: int) -> None:
    """covers: C13. Bit for bit: ties, NaN, spans of many candidates and of none, every mode, pads, again and again."""
    spans, width, table_rows = len(counts), data.draw(st.sampled_from((12, 24, 90))), 6
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = torch.randperm(table_rows - 1, generator=random)[:spans]
    slots = torch.where(torch.tensor(counts) > 0, rows, table_rows - 1)
    stored = torch.randint(-1, width, (table_rows, most), generator=random)
    modes = torch.tensor([data.draw(st.integers(0, 2)) for _ in counts])
    thresholds = torch.tensor([data.draw(st.integers(0, 6)) for _ in counts])
    block_table = torch.randint(1, 99, (spans * width + 1,), generator=random)
    of_spans = [one.to(DEVICE) for one in (slots, torch.tensor(counts), modes, thresholds)]
    owners = torch.arange(spans).repeat_interleave(width).to(DEVICE)
    real = torch.ones(spans, dtype=torch.int64, device=DEVICE)
    ready = prepare_spans(owners, real, real, 1, of_spans[1], of_spans[2], most, implementation="cuda_fused")
    assert isinstance(ready, TicketedRanges)
    selected = sum(counts) + data.draw(st.integers(0, 20))
    others = torch.randint(100, 200, (selected + 7,), generator=random).to(DEVICE)
    target = SelectedList(others.clone(), torch.randperm(selected + 7, generator=random)[:selected].to(DEVICE))
    tables = [stored.clone().to(DEVICE) for _ in range(2)]
    checks = [torch.tensor([3, 4], device=DEVICE) for _ in range(2)]
    for layer in range(3):
        given_scores = torch.randint(0, 5, (spans * width,), generator=random).float().to(DEVICE)
        given_scores[torch.randint(0, spans * width, (2,), generator=random)] = float("nan")
        places = torch.arange(spans * width, device=DEVICE)
        places[torch.randint(0, spans * width, (3,), generator=random)] = spans * width
        fresh = choose_blocks(given_scores, places, spans, width, most, implementation="reference")
        rest = width, block_table.to(DEVICE), selected
        expected = take_choice(fresh, ChoosingSpans(tables[0], *of_spans, *rest, checks[0]), implementation="cuda")
        one_launch = {"implementation": "cuda_fused", "prepared": ready if layer else None, "target": target}
        choosing = ChoosingSpans(tables[1], *of_spans, *rest, checks[1])
        found = rank_and_take(given_scores, places, choosing, **one_launch)
        for one, other in zip((*found, checks[1]), (*expected, checks[0]), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(tables[0][slots[torch.tensor(counts) > 0]], tables[1][slots[torch.tensor(counts) > 0]])
        assert target.holds is found[1]
        expected_list = others.clone()
        expected_list[target.places] = expected[1]
        assert torch.equal(target.blocks, expected_list)
        assert not ready.tickets.any(), "ready for the next layer"


def test_launches_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice and its hand-over are one launch after the scores, which are two."""
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import scores as kernels
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import selection, streamed_scores

    names = {
        kernels: ("estimate_boxes", "find_candidates", "span_sums", "block_shares"),
        streamed_scores: ("stream_boxes", "share_blocks"),
        selection: ("rank_candidates", "take_choices", "rank_and_take"),
    }
    launches = {name: Launches() for of_module in names.values() for name in of_module}
    for module, of_module in names.items():
        for name in of_module:
            monkeypatch.setattr(module, name, launches[name])
    query, summaries = torch.empty(2, 8, 16), torch.empty(9, 3, 2, 16)
    ids, ones = torch.zeros(300, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    one = BLOCK_SELECTION.make("cuda_fused")
    ready = one.prepare(ids, ones, ones, 1, ones, ones, 7)
    before = {name: len(kernel.grids) for name, kernel in launches.items()}
    found = one.scores(query, summaries, ids, ids, ones, ones, 1, 1.0, SummaryKind.BOX_MEAN, ready)
    assert found is not None
    table, stored = torch.zeros(2 * 300 + 1, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    target = SelectedList(ids, ids[:9])
    one.rank_and_take(found, ids, ChoosingSpans(stored, *4 * [ones], 300, table, 9, ones), ready, target)
    queued = {name: len(kernel.grids) - before[name] for name, kernel in launches.items()}
    assert {name: count for name, count in queued.items() if count} == {
        "stream_boxes": 1,
        "share_blocks": 1,
        "rank_and_take": 1,
    }


def test_what_a_choice_in_one_launch_refuses() -> None:
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    table, scored = torch.zeros(9, dtype=torch.int64, device=DEVICE), torch.zeros(2, device=DEVICE)
    choosing = ChoosingSpans(ids.new_zeros(2, 4), *4 * [ids], 4, table, 0, ids)
    with pytest.raises(ValueError, match=r"rank_and_take: places is torch\.int64"):
        rank_and_take(scored, table, choosing, implementation="cuda_fused")
    target = SelectedList(ids, ids)
    with pytest.raises(ValueError, match=r"rank_and_take: target.places is torch.int64 \(2,\)"):
        rank_and_take(scored, ids, choosing, implementation="cuda_fused", target=target)


def test_what_a_hand_over_refuses() -> None:
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    fresh, table = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    rest = (*4 * [ids], 4, table, 0, ids)
    with pytest.raises(ValueError, match=r"take_choice: stored is torch.int64 \(2, 4\)"):
        take_choice(fresh, ChoosingSpans(ids.new_zeros(2, 4), *rest), implementation="cuda")
    strided = ids.new_zeros(3, 2).T
    with pytest.raises(ValueError, match=r"take_choice: fresh has strides .*, expected a contiguous tensor"):
        take_choice(strided, ChoosingSpans(fresh, *rest), implementation="cuda")
