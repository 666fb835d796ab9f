"""Blocks by their tokens: what is found is written, agrees, and is the longest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.block_policies.partial_hits.partial_blocks import PartialBlocks

SIZE = 4


def request(tokens: list[int], computed: int) -> Any:
    hashes = [tuple(tokens[: SIZE * (number + 1)]) for number in range(len(tokens) // SIZE)]
    return SimpleNamespace(
        all_token_ids=tokens, num_tokens=len(tokens), num_computed_tokens=computed, block_hashes=hashes
    )


def blocks(count: int) -> list[Any]:
    return [SimpleNamespace(is_null=False) for _ in range(count)]


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=11)


@given(st.lists(st.tuples(sequences, st.integers(0, 12), st.booleans()), max_size=6), sequences)
def test_the_longest_part_is_found(held: list[tuple[list[int], int, bool]], wanted: list[int]) -> None:
    """Against a search through everything; `gone`: the request has ended."""
    index, known = PartialBlocks(SIZE), []
    for tokens, computed, gone in held:
        one, own = request(tokens, min(computed, len(tokens))), blocks(-(-len(tokens) // SIZE))
        assert index.follow(one, "root", own, 0) == len(own)
        if gone:
            index.leave(one, own)
        known += [(tokens, min(computed, len(tokens)), number, block) for number, block in enumerate(own)]
    full = len(wanted) // SIZE
    before = tuple(wanted[: SIZE * full]) if full else "root"
    rest = wanted[SIZE * full :]
    match, _ = index.find(before, rest)
    longest = 0
    for tokens, computed, number, _ in known:
        if number == full and tokens[: SIZE * full] == wanted[: SIZE * full]:
            written = tokens[SIZE * full : min(computed, SIZE * (full + 1))]
            agree = next((at for at, (a, b) in enumerate(zip(written, rest, strict=False)) if a != b), None)
            longest = max(longest, min(len(written), len(rest)) if agree is None else agree)
    assert (0 if match is None else match.tokens) == longest
    if match is not None:
        assert index.holds(match.block)


def test_what_a_step_is_about_to_write_is_no_match_but_is_known() -> None:
    index = PartialBlocks(SIZE)
    one, (block,) = request([1, 2, 3], 0), blocks(1)
    index.follow(one, "root", [block], 0)
    assert index.find("root", [1, 2, 9]) == (None, 2)
    one.num_computed_tokens = 3
    match, _ = index.find("root", [1, 2, 9])
    assert match is not None
    assert (match.block, match.tokens) == (block, 2)
    assert index.find("root", [1, 2, 9], {id(block)})[0] is None


def test_a_block_that_is_given_away_is_forgotten() -> None:
    index = PartialBlocks(SIZE)
    one, own = request([1, 2, 3, 4, 5], 5), blocks(2)
    index.follow(one, "root", own, 0)
    index.leave(one, own)
    assert len(index) == 2
    index.forget(own[0])
    assert [index.holds(block) for block in own] == [False, True]
    assert index.find("root", [1, 2])[0] is None
    index.clear()
    assert not len(index)


def test_a_block_that_two_requests_hold_stays_known_when_one_goes() -> None:
    index = PartialBlocks(SIZE)
    first, second, (block,) = request([1, 2, 3], 3), request([1, 2, 3, 4], 3), blocks(1)
    index.follow(first, "root", [block], 0)
    index.leave(second, [block])
    match, _ = index.find("root", [1, 2, 3])
    assert match is not None
    assert match.tokens == 3


def test_groups_have_blocks_of_their_own() -> None:
    """A null block, before a window, holds nothing; other groups have what one has given away."""
    index = PartialBlocks(SIZE)
    one, whole, window = request([1, 2, 3, 4, 5, 6], 6), blocks(2), blocks(2)
    window[0].is_null = True
    assert index.follow(one, "root", whole, 0, 0) == index.follow(one, "root", window, 0, 1) == 2
    assert len(index) == 3
    assert [index.find("root", [1, 2], group=group)[0] is not None for group in (0, 1)] == [True, False]
    before = (1, 2, 3, 4)
    found = [index.find(before, [5, 6, 7], group=group)[0] for group in (0, 1)]
    assert [(match.block, match.tokens) for match in found if match is not None] == [(whole[1], 2), (window[1], 2)]
    index.forget(window[1])
    assert [index.find(before, [5], group=group)[0] is not None for group in (0, 1)] == [True, False]
