"""A layer under a sparse method against attention in float64, over steps as a scheduler makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.selection.one_layer import Member, OneLayer, select
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

# fp32 attention of at most 128 tokens: products and sums of 128 terms, 2^-24 each, with room for the exponentials
TOLERANCE = 128 * 8 * 2.0**-24


def options(**given: Any) -> BlockOptions:
    small = {"sparse_ratio": 0.3, "min_tokens": 8, "min_blocks": 1, "local_window_sz": 1, "summary": "mean"}
    return BlockOptions(**{**small, **given})


def decide(layer: OneLayer, member: Member, mode: SelectionMode = SelectionMode.SELECT) -> Member:
    context = member.computed + member.new - member.drafts
    budget = block_budget(context, layer.block_size, layer.options)
    member.decision = None if budget is None else select(budget, mode)
    return member


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.isfinite().all()
    assert (found.double() - expected).abs().max() <= TOLERANCE


def prefill(layer: OneLayer, request_id: str, tokens: int, chunk: int = 16) -> None:
    for start in range(0, tokens, chunk):
        layer.step([Member(request_id, start, min(chunk, tokens - start))])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("summary", ["mean", "minmax", "box_mean", "hash", "codes"])
def test_a_budget_of_all_blocks_is_dense(static: bool, summary: str) -> None:
    layer = OneLayer(options(sparse_ratio=1.0, summary=summary), static=static)
    prefill(layer, "a", 60)
    prefill(layer, "b", 33)
    for step in range(6):
        members = [decide(layer, Member("a", 60 + step, 1)), decide(layer, Member("b", 33 + step, 1))]
        seen = layer.step([*members, Member("c", 8 * step, 8)])
        assert any(entry.chosen for entry in seen.values())
        for member in members:
            assert_close(seen[member.request_id].output, layer.dense(member))
        assert_close(seen["c"].output, layer.dense(Member("c", 8 * step, 8)))


@pytest.mark.parametrize("static", [False, True])
def test_a_small_budget_attends_to_live_and_chosen_blocks_and_to_nothing_else(static: bool) -> None:
    """covers: C11 C12 C16"""
    layer = OneLayer(options(), static=static)
    prefill(layer, "a", 80)
    prefill(layer, "b", 50)
    for step in range(9):
        members = [
            Member("x", 4 * step, 4),
            decide(layer, Member("a", 80 + step, 1)),
            decide(layer, Member("b", 50 + step, 1)),
        ]
        seen = layer.step(members)
        for member in members[1:]:
            chosen = seen[member.request_id].chosen
            assert chosen is not None
            assert member.decision is not None
            sink, window, count = (
                member.decision.sink_blocks,
                member.decision.window_start,
                member.decision.num_selected,
            )
            assert len(set(chosen)) == count
            assert all(sink <= block < window for block in chosen)
            end = (member.computed + 1 + 3) // 4
            live = {*range(sink), *range(window, end)}
            assert_close(seen[member.request_id].output, layer.dense(member, live | set(chosen)))


@pytest.mark.parametrize("static", [False, True])
def test_the_rows_of_a_verification_share_one_choice(static: bool) -> None:
    """covers: C16"""
    layer = OneLayer(options(), static=static)
    prefill(layer, "a", 80)
    member = decide(layer, Member("a", 80, 4, drafts=3))
    seen = layer.step([member, Member("b", 0, 5)])
    chosen, decision = seen["a"].chosen, member.decision
    assert chosen is not None
    assert decision is not None
    live = {*range(decision.sink_blocks), *range(decision.window_start, 21)}
    assert_close(seen["a"].output, layer.dense(member, live | set(chosen)))
    assert_close(seen["b"].output, layer.dense(Member("b", 0, 5)))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize(("computed", "new"), [(80, 2), (80, 3), (80, 4), (82, 2), (79, 1)])
def test_the_rest_of_a_prompt_shares_one_choice(computed: int, new: int, implementation: str) -> None:
    """More rows than a verification has here, up to a block that becomes full; beside a decode and a dense prompt."""
    layer = OneLayer(options(), max_rows=1, implementation=implementation)
    prefill(layer, "a", computed)
    prefill(layer, "d", 50)
    member, decode = decide(layer, Member("a", computed, new)), decide(layer, Member("d", 50, 1))
    seen = layer.step([member, Member("b", 0, 5), decode])
    for one, end in ((member, 21), (decode, 13)):
        chosen, decision = seen[one.request_id].chosen, one.decision
        assert chosen
        assert decision is not None
        live = {*range(decision.sink_blocks), *range(decision.window_start, end)}
        assert_close(seen[one.request_id].output, layer.dense(one, live | set(chosen)))
    assert_close(seen["b"].output, layer.dense(Member("b", 0, 5)))


@pytest.mark.parametrize("summary", ["mean", "box_mean", "hash", "codes"])
@pytest.mark.parametrize(("computed", "new"), [(80, 2), (80, 4), (82, 2), (79, 1), (116, 4)])
def test_the_rest_of_a_prompt_in_a_graph_of_its_own(computed: int, new: int, summary: str) -> None:
    """As at true shapes, choice and output; what pads hold reaches nobody. covers: A9 C16"""
    found = []
    for static in (True, False):
        layer = OneLayer(options(summary=summary), max_rows=1, static=static)
        prefill(layer, "a", computed)
        member = decide(layer, Member("a", computed, new))
        found.append(layer.step([member])["a"])
        chosen, decision = found[-1].chosen, member.decision
        assert chosen
        assert decision is not None
        live = {*range(decision.sink_blocks), *range(decision.window_start, (computed + new + 3) // 4)}
        assert_close(found[-1].output, layer.dense(member, live | set(chosen)))
    assert set(found[0].chosen or ()) == set(found[1].chosen or ())


@pytest.mark.parametrize("static", [False, True])
def test_a_reused_choice_stays_and_the_newest_tokens_are_always_seen(static: bool) -> None:
    """covers: C12. Blocks that fill up while a choice is used again compete for the next one only."""
    layer = OneLayer(options(), static=static)
    prefill(layer, "a", 80)
    first = decide(layer, Member("a", 80, 1))
    kept = layer.step([first])["a"].chosen
    decision = first.decision
    assert kept
    assert decision is not None
    for step in range(1, 12):
        budget = (decision.sink_blocks, decision.window_start, decision.num_selected)
        member = Member("a", 80 + step, 1, decision=select(budget, SelectionMode.REUSE))
        seen = layer.step([member])["a"]
        assert seen.chosen == kept
        live = {*range(decision.sink_blocks), *range(decision.window_start, 40)}
        assert_close(seen.output, layer.dense(member, live | set(kept)))


@pytest.mark.parametrize(("threshold", "keeps"), [(0, False), (100, True)])
def test_a_check_keeps_the_stored_choice_within_the_threshold(threshold: int, keeps: bool) -> None:
    """covers: C18"""
    layer = OneLayer(options(), seed=3)
    prefill(layer, "a", 100)
    stored = layer.step([decide(layer, Member("a", 100, 1))])["a"].chosen
    differs = False
    for step in range(1, 8):
        budget = block_budget(101 + step, 4, layer.options)
        assert budget is not None
        check = select(budget, SelectionMode.CHECK, threshold)
        chosen = layer.step([Member("a", 100 + step, 1, decision=check)])["a"].chosen
        assert chosen is not None
        assert stored is not None
        # a longer context has a larger budget: what is kept may be followed by more
        differs |= not set(stored) <= set(chosen)
        stored = chosen
    assert differs is not keeps
    kept, replaced = layer.selector.checks.tolist()
    assert kept + replaced == 7
    assert (replaced == 0) is keeps


@pytest.mark.parametrize("static", [False, True])
def test_rejected_drafts_never_reach_a_summary(static: bool) -> None:
    """covers: C20. Drafts fill a block, are rejected, and other tokens take their place."""
    layer = OneLayer(options(), static=static)
    prefill(layer, "a", 79)
    layer.step([decide(layer, Member("a", 79, 4, drafts=3))])
    assert not layer.state.summaries.ready[layer.tables["a"][20]]
    for position in range(80, 90):
        layer.step([decide(layer, Member("a", position, 1))])
    block = layer.tables["a"][20]
    assert layer.state.summaries.ready[block]
    assert torch.equal(layer.selector._summaries[0][block, 0], layer.keys[block].mean(0))


def test_a_block_of_another_request_loses_its_summary() -> None:
    """covers: C5 C11. The pool hands a block out again: what is chosen by is the new owner's."""
    layer = OneLayer(options(), num_blocks=24)
    prefill(layer, "a", 80)
    layer.step([decide(layer, Member("a", 80, 1))])
    layer.finish("a")
    prefill(layer, "b", 76)
    member = decide(layer, Member("b", 76, 1))
    seen = layer.step([member])["b"]
    decision = member.decision
    assert seen.chosen
    assert decision is not None
    live = {*range(decision.sink_blocks), *range(decision.window_start, 20)}
    assert_close(seen.output, layer.dense(member, live | set(seen.chosen)))
    full = layer.tables["b"][:19]
    assert torch.allclose(layer.selector._summaries[0][full, 0], layer.keys[full].mean(1))


@pytest.mark.parametrize("static", [False, True])
def test_blocks_with_two_owners_are_read_and_never_written(static: bool) -> None:
    """covers: C10. Requests that share a prefix choose in it each for itself, and leave it as it is."""
    layer = OneLayer(options(), static=static)
    prefill(layer, "a", 80)
    shared = layer.tables["a"][:15]
    layer.tables["b"] = list(shared)
    layer.step([Member("b", 60, 12)])
    kept = layer.keys[shared].clone(), layer.values[shared].clone(), layer.selector._summaries[0][shared].clone()
    for step in range(5):
        members = [decide(layer, Member("a", 80 + step, 1)), decide(layer, Member("b", 72 + step, 1))]
        seen = layer.step(members)
        assert all(set(seen[member.request_id].chosen or ()) & set(range(15)) for member in members)
    assert all(layer.state.summaries.ready[block] for block in shared)
    now = layer.keys[shared], layer.values[shared], layer.selector._summaries[0][shared]
    assert all(torch.equal(one, other) for one, other in zip(now, kept, strict=True))


def test_a_request_that_takes_an_id_again_has_no_choice_stored() -> None:
    """covers: C5"""
    layer = OneLayer(options())
    prefill(layer, "a", 80)
    layer.step([decide(layer, Member("a", 80, 1))])
    layer.finish("a")
    prefill(layer, "a", 60)
    # the scheduler would say SELECT; a worker that knows no choice selects in any case
    member = decide(layer, Member("a", 60, 1), SelectionMode.REUSE)
    chosen = layer.step([member])["a"].chosen
    assert chosen is not None
    assert member.decision is not None
    assert all(block < member.decision.window_start for block in chosen)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), static=st.booleans(), ratio=st.sampled_from([0.1, 0.3, 0.7, 1.0]))
def test_any_sequence_of_steps(data: st.DataObject, static: bool, ratio: float) -> None:
    """covers: C13 C16 C24. Prompts in chunks, decodes, verifications with partial acceptance, ends and reused ids."""
    layer = OneLayer(options(sparse_ratio=ratio), static=static, num_blocks=160)
    computed: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 10))):
        names = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        members = []
        for name in names:
            done = computed.get(name, 0)
            if done > 100 or (done and data.draw(st.integers(0, 9)) == 0):
                layer.finish(name)
                done = computed[name] = 0
            decodes = done > 0 and data.draw(st.booleans())
            drafts = data.draw(st.integers(0, 3)) if decodes else 0
            new = 1 + drafts if decodes else data.draw(st.integers(1, 14))
            member = Member(name, done, new, drafts)
            if decodes:
                decide(layer, member, data.draw(st.sampled_from(list(SelectionMode))))
            members.append(member)
        seen = layer.step(members)
        for member in members:
            computed[member.request_id] = member.computed + member.new - data.draw(st.integers(0, member.drafts))
            found = seen[member.request_id]
            assert found.output.isfinite().all()
            if member.decision is None or ratio == 1.0:
                assert_close(found.output, layer.dense(member))
