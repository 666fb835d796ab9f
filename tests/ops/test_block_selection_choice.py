"""The choice of blocks by score, and the checkpoint that keeps or replaces a stored choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.block_selection_choice import SCORES
from vllm_gaudi_ucm.ops.block_selection.api import choose_blocks, keep_or_replace, prepare_spans

COMMON = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SELECT, REUSE, CHECK = 0, 1, 2


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@given(data=st.data(), num_spans=st.integers(0, 4), width=st.integers(0, 9), most=st.integers(0, 12))
@COMMON
def test_choice_equals_a_sort(implementation: str, data: st.DataObject, num_spans: int, width: int, most: int) -> None:
    """covers: C13. Never more than there are, never a block that does not exist, ties by number."""
    subset = st.dictionaries(st.integers(0, max(0, width - 1)), SCORES, max_size=width)
    wanted = [data.draw(subset) if width else {} for _ in range(num_spans)]
    entries = [(span * width + block, score) for span, some in enumerate(wanted) for block, score in some.items()]
    entries += [(num_spans * width, data.draw(SCORES)) for _ in range(data.draw(st.integers(0, 3)))]
    entries = data.draw(st.permutations(entries))
    places = torch.tensor([place for place, _ in entries], dtype=torch.int64)
    scores = torch.tensor([score for _, score in entries], dtype=torch.float32)
    found = choose_blocks(scores, places, num_spans, width, most, implementation=implementation)
    assert tuple(found.shape) == (num_spans, most)
    lowest = torch.finfo(torch.float32).min
    for span, some in enumerate(wanted):
        ranking = sorted(some, key=lambda block: (-max(some[block], lowest), block))[:most]
        assert found[span].tolist() == ranking + [-1] * (most - len(ranking))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_candidate_without_a_number_for_a_score_comes_first(implementation: str) -> None:
    scores = torch.tensor([0.5, float("nan"), 0.25])
    assert choose_blocks(scores, torch.tensor([3, 1, 0]), 1, 4, 3, implementation=implementation).tolist() == [
        [1, 3, 0]
    ]


def test_scores_of_low_precision() -> None:
    scores = torch.tensor([0.5, 0.75, 0.25], dtype=torch.bfloat16)
    assert choose_blocks(scores, torch.arange(3), 1, 3, 2).tolist() == [[1, 0]]


def _keep(
    stored: list[int], fresh: list[int], count: int, mode: int, threshold: int, width: int = 10
) -> tuple[list[int], bool, bool]:
    chosen, kept, replaced = keep_or_replace(
        torch.tensor([stored]),
        torch.tensor([fresh]),
        torch.tensor([count]),
        torch.tensor([mode]),
        torch.tensor([threshold]),
        width,
    )
    return chosen[0].tolist(), bool(kept), bool(replaced)


OLD, NEW = [1, 2, 3, 4], [9, 3, 2, 7]


@pytest.mark.parametrize(
    ("fresh", "count", "threshold", "keeps"),
    [
        ([4, 3, 2, 1], 4, 0, True),  # the order is no difference
        ([4, 3, 2, 9], 4, 1, False),  # one added and one removed are two
        ([4, 3, 2, 9], 4, 2, True),
        ([9, 8, 2, 1], 4, 3, False),
        ([9, 8, 2, 1], 4, 4, True),
        ([1, 9, 8, 7], 1, 0, True),  # what is beyond the count is not attended and not compared
        ([1, 9, 8, 7], 2, 1, False),
        ([2, 1, 9, 9], 2, 0, True),
        (NEW, 0, 0, True),
    ],
)
def test_a_check_compares_what_is_attended_as_sets(fresh: list[int], count: int, threshold: int, keeps: bool) -> None:
    """covers: C4, C18. |added| + |removed| <= threshold, whatever the threshold and the budget are."""
    found = _keep(OLD, fresh, count, CHECK, threshold)
    assert found == (OLD if keeps else fresh, keeps, not keeps)


def test_modes_without_a_comparison() -> None:
    assert _keep(OLD, NEW, 4, SELECT, 100) == (NEW, False, False)
    assert _keep(OLD, NEW, 4, REUSE, 0) == (OLD, False, False)
    assert _keep([-1] * 4, NEW, 4, REUSE, 0) == ([-1] * 4, False, False)


@pytest.mark.parametrize("stored", [[-1] * 4, [1, 2, 3, -1], [1, 2, 3, 10]])
def test_a_stored_choice_of_too_few_blocks_is_replaced(stored: list[int]) -> None:
    """covers: C13, C18. Also where the difference would be small enough, and for blocks beyond the table."""
    assert _keep(stored, NEW, 4, CHECK, 100) == (NEW, False, True)


def test_a_stored_choice_may_be_longer_than_what_is_attended() -> None:
    assert _keep([1, 2, 3, -1], [3, 2, 1, 5], 3, CHECK, 0) == ([1, 2, 3, -1], True, False)


@given(data=st.data(), spans=st.integers(1, 5), most=st.integers(1, 6), width=st.integers(1, 8))
@COMMON
def test_every_span_for_itself(data: st.DataObject, spans: int, most: int, width: int) -> None:
    """covers: C18. Any rankings, counts, modes and thresholds, against Python's sets."""
    ranking = st.permutations(range(width)).flatmap(
        lambda order: st.integers(0, min(most, width)).map(lambda n: [*order[:n], *[-1] * (most - n)])
    )
    lists = [data.draw(st.lists(ranking, min_size=spans, max_size=spans)) for _ in range(2)]
    counts, modes, thresholds = (
        data.draw(st.lists(st.integers(0, top), min_size=spans, max_size=spans)) for top in (most, 2, 2 * most)
    )
    stored, fresh = (torch.tensor(values) for values in lists)
    numbers = [torch.tensor(values) for values in (counts, modes, thresholds)]
    chosen, kept, replaced = keep_or_replace(stored, fresh, *numbers, width)
    for span in range(spans):
        old, new = ({block for block in some[span][: counts[span]] if block >= 0} for some in lists)
        close = len(old ^ new) <= thresholds[span] and len(old) == counts[span]
        keeps = modes[span] == REUSE or (modes[span] == CHECK and close)
        assert chosen[span].tolist() == lists[0 if keeps else 1][span]
        assert kept[span] == (modes[span] == CHECK and close)
        assert replaced[span] == (modes[span] == CHECK and not close)


def test_traces_as_one_graph() -> None:
    stored = torch.tensor([OLD, OLD])
    ones = torch.ones(2, dtype=torch.int64)

    def step(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = choose_blocks(scores, torch.arange(20), 2, 10, 4)
        return keep_or_replace(stored, fresh, 4 * ones, CHECK * ones, ones, 10)

    scores = torch.rand(20, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(torch.compile(step, backend="eager", fullgraph=True)(scores), step(scores), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fresh": torch.zeros(2, 3, dtype=torch.int64)}, r"fresh is .*\(2, 3\) on cpu, expected torch.int64 \(1, 4\)"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, r"counts is .* expected torch.int64 \(1\)"),
        ({"modes": torch.zeros(1)}, "modes is torch.float32"),
        ({"thresholds": torch.zeros((), dtype=torch.int64)}, "thresholds is"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    ranking, one = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    arguments = {"stored": ranking, "fresh": ranking, "counts": one, "modes": one, "thresholds": one, **change}
    with pytest.raises(ValueError, match=message):
        keep_or_replace(**arguments, width=9)
    with pytest.raises(ValueError, match=r"places is torch\.int32"):
        choose_blocks(torch.zeros(3), torch.zeros(3, dtype=torch.int32), 1, 3, 1)
    with pytest.raises(ValueError, match="most=-1, expected none below 0"):
        choose_blocks(torch.zeros(3), torch.zeros(3, dtype=torch.int64), 1, 3, -1)


@given(data=st.data(), spans=st.integers(1, 4), most=st.integers(1, 9), width=st.integers(1, 8))
@COMMON
def test_gaudis_choice_equals_the_reference(data: st.DataObject, spans: int, most: int, width: int) -> None:
    """covers: C13, C18. Without equal scores, of which it may take any."""
    some = data.draw(st.lists(st.integers(0, spans * width - 1), unique=True))
    places = torch.tensor([*some, spans * width, spans * width])
    scores = torch.tensor(data.draw(st.permutations(range(len(places))))) / len(places)
    fresh = choose_blocks(scores, places, spans, width, most, implementation="reference")
    assert torch.equal(choose_blocks(scores, places, spans, width, most, implementation="hpu"), fresh)
    stored = choose_blocks(scores.flip(0), places, spans, width, most, implementation="reference")
    sizes = [torch.tensor(data.draw(st.lists(st.integers(0, n), min_size=spans, max_size=spans))) for n in (most, 2, 6)]
    by_name = [keep_or_replace(stored, fresh, *sizes, width, implementation=name) for name in ("reference", "hpu")]
    one_row = torch.arange(spans), torch.arange(spans), torch.ones(spans, dtype=torch.int64), 1
    prepared = prepare_spans(*one_row, *sizes[:2], most, implementation="hpu")
    assert prepared is not None
    by_name.append(keep_or_replace(stored, fresh, *sizes, width, implementation="hpu", prepared=prepared))
    for results in zip(*by_name, strict=True):
        assert all(torch.equal(one, results[0]) for one in results)
