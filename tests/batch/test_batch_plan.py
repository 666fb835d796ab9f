"""`plan_batch` against an oracle that knows only (request, position <= p)."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import POISON_BLOCK, Request, Step, lay_out, steps
from tests.batch.expand import causal_pairs, expand, expected, owners, shared_pairs, unique_pairs
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch

SLICES = st.sampled_from([1, 3, 16, 512])


@settings(max_examples=200)
@given(steps(), SLICES)
def test_each_row_sees_each_position_of_its_request_once(step: Step, causal_slice: int) -> None:
    """covers: A1 A2 A3 A5"""
    plan = plan_batch(step.batch_input(), step.block_size, causal_slice)
    assert expand(plan, step) == expected(plan, step)


@given(steps(), SLICES)
def test_rows_positions_and_slots(step: Step, causal_slice: int) -> None:
    plan = plan_batch(step.batch_input(), step.block_size, causal_slice)
    rows = owners(plan, step)
    assert sorted(plan.requests.tolist()) == list(range(len(step.requests)))
    assert plan.num_rows == len(rows) == plan.query_start[-1]
    assert [int(plan.requests[i]) for i in plan.row_requests] == [request for request, _ in rows]
    assert plan.positions.tolist() == [position for _, position in rows]
    places = [step.place(*row) for row in rows]
    assert plan.slots.tolist() == [block * step.block_size + offset for block, offset in places]


@given(steps())
def test_single_rows_come_first_and_otherwise_the_order_stays(step: Step) -> None:
    """A steady decode batch keeps its layout. covers: A8"""
    plan = plan_batch(step.batch_input(), step.block_size)
    new = [step.requests[i].new for i in plan.requests]
    assert plan.num_single == new.count(1)
    assert new[: plan.num_single] == [1] * plan.num_single
    singles, others = np.split(plan.requests, [plan.num_single])
    assert np.all(np.diff(singles) > 0)
    assert np.all(np.diff(others) > 0)


@given(steps())
def test_only_requests_without_a_rest_yield_logits(step: Step) -> None:
    """A partial chunk yields none, wherever it stands in the batch; the row is the request's last. covers: A3 A4"""
    plan = plan_batch(step.batch_input(), step.block_size)
    complete = [i for i in plan.requests.tolist() if step.requests[i].behind == 0]
    assert plan.logits_requests.tolist() == complete
    last_row = {request: row for row, (request, _) in enumerate(owners(plan, step))}
    assert plan.logits_rows.tolist() == [last_row[i] for i in complete]


@given(steps())
def test_a_block_is_shared_if_more_than_one_row_uses_it(step: Step) -> None:
    plan = plan_batch(step.batch_input(), step.block_size)
    rows_of: dict[int, set[int]] = {}
    for row, request, position in [*shared_pairs(plan, step), *unique_pairs(plan, step)]:
        rows_of.setdefault(step.place(request, position)[0], set()).add(row)
    shared = [] if plan.shared is None else plan.shared.blocks.tolist()
    unique = [] if plan.unique is None else plan.unique.blocks.tolist()
    assert sorted(shared) == sorted(block for block, rows in rows_of.items() if len(rows) > 1)
    assert sorted(unique) == sorted(block for block, rows in rows_of.items() if len(rows) == 1)
    assert plan.shared is None or shared
    assert plan.unique is None or unique


@given(steps())
def test_a_part_exists_exactly_if_it_has_pairs(step: Step) -> None:
    plan = plan_batch(step.batch_input(), step.block_size)
    assert (plan.causal is not None) == any(request.new > 1 for request in step.requests)
    assert (plan.shared is not None) == bool(list(shared_pairs(plan, step)))
    assert (plan.unique is not None) == bool(list(unique_pairs(plan, step)))


@given(steps(), SLICES)
def test_causal_slices_never_mix_requests(step: Step, causal_slice: int) -> None:
    """Packed short prompts cost their own squares, cut in slices that skip later keys. covers: A15"""
    plan = plan_batch(step.batch_input(), step.block_size, causal_slice)
    if plan.causal is None:
        return
    owner = [request for request, _ in owners(plan, step)]
    covered: Counter[int] = Counter()
    for query_lo, query_hi, key_lo, key_hi in plan.causal.slices:
        assert 0 < query_hi - query_lo <= causal_slice
        assert key_hi == query_hi
        assert len(set(owner[min(query_lo, key_lo) : max(query_hi, key_hi)])) == 1
        covered.update(range(query_lo, query_hi))
    multi = [row for row, request in enumerate(owner) if step.requests[request].new > 1]
    assert covered == Counter(multi)
    assert all(plan.causal.groups[row] < 0 for row in range(plan.num_single))


@given(steps())
def test_shared_groups_cost_the_pairs_in_use(step: Step) -> None:
    """rows x blocks of the groups are exactly the (row, block) pairs with a non-empty range. covers: A13 A14"""
    plan = plan_batch(step.batch_input(), step.block_size)
    if plan.shared is None:
        return
    cost: Counter[tuple[int, int]] = Counter()
    for rows, block_lo, block_hi in plan.shared.groups:
        assert block_lo < block_hi
        cost.update((row, index) for row in rows.tolist() for index in range(block_lo, block_hi))
    in_use = plan.shared.hi[plan.row_requests] > plan.shared.lo[plan.row_requests]
    assert cost == Counter(map(tuple, np.argwhere(in_use).tolist()))
    assert plan.shared.hi.shape == plan.shared.lo.shape == (len(step.requests), len(plan.shared.blocks))


@given(steps())
def test_no_two_shared_groups_have_the_same_rows(step: Step) -> None:
    """Also where requests share crosswise, so that equal users are not neighbours. covers: A13"""
    plan = plan_batch(step.batch_input(), step.block_size)
    groups = [] if plan.shared is None else plan.shared.groups
    assert len({tuple(rows.tolist()) for rows, _, _ in groups}) == len(groups)
    assert [lo for _, lo, _ in groups] == [0, *(hi for _, _, hi in groups)][: len(groups)]
    assert all(np.all(np.diff(rows) > 0) for rows, _, _ in groups)


@given(steps(), st.randoms(use_true_random=False))
def test_a_permuted_batch_computes_the_same(step: Step, rng: random.Random) -> None:
    order = list(range(len(step.requests)))
    rng.shuffle(order)
    shuffled = Step([step.requests[i] for i in order], [step.tables[i] for i in order], step.block_size, 0)

    def by_token(step: Step, names: list[int]) -> Counter[tuple[int, int, int]]:
        plan = plan_batch(step.batch_input(), step.block_size)
        rows = owners(plan, step)
        return Counter((names[rows[row][0]], rows[row][1], position) for row, _, position in expand(plan, step))

    assert by_token(step, list(range(len(order)))) == by_token(shuffled, order)


@given(steps())
def test_the_input_is_left_alone(step: Step) -> None:
    batch = step.batch_input()
    arrays = (*batch[:3], *batch.tables)
    before = [array.copy() for array in arrays]
    plan_batch(batch, step.block_size)
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, before, strict=True))


def test_no_request() -> None:
    plan = plan_batch(lay_out([], 16, 0).batch_input(), 16)
    assert plan.num_rows == plan.num_single == len(plan.logits_rows) == len(plan.requests) == 0
    assert (plan.causal, plan.shared, plan.unique) == (None, None, None)


@pytest.mark.parametrize("position", [0, 1, 14, 15, 16, 17, 31, 32])
def test_a_decode_sees_itself_and_nothing_beyond_at_block_boundaries(position: int) -> None:
    """covers: A5"""
    step = lay_out([Request(position, 1)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.unique is not None
    assert plan.unique.hi.tolist() == [16] * (position // 16) + [position % 16 + 1]
    assert not plan.unique.lo.any()


def test_verify_rows_are_causal_among_themselves_on_an_unaligned_context() -> None:
    """Drafts never see later drafts. covers: A2"""
    step = lay_out([Request(21, 1), Request(21, 4)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert sorted(causal_pairs(plan)) == [(row, 1, 20 + seen) for row in range(1, 5) for seen in range(1, row + 1)]
    assert plan.shared is not None
    assert plan.shared.hi[1].tolist() == [16, 5] or plan.shared.hi[1].tolist() == [5, 16]


def test_a_resumed_request_is_a_chunk_like_any_other() -> None:
    """Computed tokens from a prefix hit, outputs among the tokens to compute: still causal rows. covers: A3"""
    step = lay_out([Request(32, 9, prefix=2), Request(40, 1, prefix=2)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.causal is not None
    assert plan.num_single == 1
    assert plan.logits_rows.tolist() == [0, 9]
    assert expand(plan, step) == expected(plan, step)


def test_packed_prompts_cost_their_own_squares() -> None:
    """covers: A15"""
    step = lay_out([Request(0, 8) for _ in range(32)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.causal is not None
    cost = sum((query_hi - query_lo) * (key_hi - key_lo) for query_lo, query_hi, key_lo, key_hi in plan.causal.slices)
    assert cost == 32 * 8 * 8


def test_unrelated_chunks_with_contexts_of_their_own_are_not_multiplied_with_each_other() -> None:
    """covers: A13"""
    step = lay_out([Request(64, 8) for _ in range(16)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    assert sum(len(rows) * (hi - lo) for rows, lo, hi in plan.shared.groups) == 16 * 8 * 4
    assert expand(plan, step) == expected(plan, step)


def test_a_prefix_of_all_is_one_group() -> None:
    step = lay_out([Request(48, 1, prefix=3) for _ in range(20)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    (group,) = plan.shared.groups
    assert (group[0].tolist(), group[1], group[2]) == (list(range(20)), 0, 3)


def test_a_prefix_of_all_is_one_group_with_what_all_use_behind_a_gap() -> None:
    """Both found the first and third block of one of two equal prefixes, and the second of different ones."""
    step = lay_out([Request(48, 1, prefix=3), Request(48, 1, prefix=3, crossed=frozenset({1}))], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    (group,) = plan.shared.groups
    assert (group[0].tolist(), group[1], group[2]) == ([0, 1], 0, 2)
    assert expand(plan, step) == expected(plan, step)


def test_blocks_with_equal_users_stand_together_though_another_comes_between() -> None:
    """Blocks of the first request are shared with the second, the third, and the second again."""
    requests = [
        Request(48, 1, prefix=3),
        Request(48, 1, prefix=3, crossed=frozenset({1})),
        Request(48, 1, prefix=3, family=1, crossed=frozenset({1})),
    ]
    step = lay_out(requests, 16, 1)
    first, second, third = step.tables[0][:3]
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    assert plan.shared.blocks.tolist() == [first, third, second]
    assert [(rows.tolist(), lo, hi) for rows, lo, hi in plan.shared.groups] == [([0, 1], 0, 2), ([0, 2], 2, 3)]
    assert expand(plan, step) == expected(plan, step)


def test_groups_behind_a_prefix_of_all() -> None:
    step = lay_out([Request(48, 1, prefix=3), Request(48, 3, prefix=3), Request(16, 1, prefix=1)], 16, 1)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    groups = [(rows.tolist(), lo, hi) for rows, lo, hi in plan.shared.groups]
    assert groups == [([0, 1, 2, 3, 4], 0, 1), ([0, 2, 3, 4], 1, 3)]
    assert plan.shared.blocks.tolist() == step.tables[0][:3]
    assert expand(plan, step) == expected(plan, step)


def test_the_largest_block_ids_cost_no_memory() -> None:
    """A count per block id would need 17 GB here."""
    top = np.iinfo(np.int32).max
    step = Step([Request(4, 1), Request(4, 1), Request(4, 3)], [[top, top - 1], [top, 5], [6, 7]], 4, 0)
    plan = plan_batch(step.batch_input(), 4)
    assert plan.shared is not None
    assert plan.unique is not None
    assert sorted(plan.shared.blocks.tolist()) == [6, top]
    assert plan.unique.blocks.tolist() == [top - 1, 5]


def test_slots_of_a_large_cache_need_more_than_31_bits() -> None:
    block, block_size = 600_000, 4096
    one = np.array([1], np.int32)
    tables = np.array([[7, block, POISON_BLOCK]], np.int32)
    plan = plan_batch(
        BatchInput(np.array([block_size + 5], np.int32), one, np.array([1], np.int32), (tables,)), block_size
    )
    assert plan.slots.tolist() == [block * block_size + 5]
    assert plan.slots[0] > np.iinfo(np.int32).max
