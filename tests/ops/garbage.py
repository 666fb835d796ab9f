"""Helpers of `test_garbage.py` that other tests use, too."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request, Shape, build, sparse_requests_strategy
from tests.ops.oracle import attend, examples


def _put(batch: Batch, which: str, slot: int, element: tuple[int | slice, int | slice], bad: float) -> None:
    """Of the key or the value at a slot of the cache, also where it is a new token's."""
    new, cache = (batch.key, batch.key_cache) if which == "key" else (batch.value, batch.value_cache)
    cache[divmod(slot, cache.shape[1])][element] = bad
    for row in range(sum(request.new for request in batch.requests)):
        if int(batch.slots[row]) == slot:
            new[row][element] = bad


def _who_sees(requests: list[Request], slot: int) -> torch.Tensor:
    """bool [rows]: where anything is left of a value of 1 there and 0 everywhere else."""
    batch = build(requests, Shape(poison=0.0))
    for tensor in (batch.value, batch.value_cache):
        tensor.zero_()
    _put(batch, "value", slot, (slice(None), slice(None)), 1.0)
    return (attend(batch, "reference") != 0).any(-1).any(-1)


@st.composite
def _requests_and_slot(draw: st.DrawFn) -> tuple[list[Request], int]:
    requests = draw(sparse_requests_strategy(4))
    assume(requests)
    cache = build(requests, Shape()).key_cache
    # half of the places are some request's last token, which somebody sees; the others may be anywhere
    last = [int(build(requests, Shape()).slots[: sum(request.new for request in requests)][-1])]
    return requests, draw(st.one_of(st.sampled_from(last), st.integers(0, cache.shape[0] * cache.shape[1] - 1)))


@given(given=_requests_and_slot(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), head=st.integers(0, 1))
@settings(max_examples=examples(40), deadline=None)
def check_value_element(implementation: str, given: tuple[list[Request], int], bad: float, head: int) -> None:
    """NaN and Inf alike, in every element, for each row that sees the token; nowhere else."""
    requests, slot = given
    batch = build(requests, Shape(poison=1e4))
    expected = attend(batch, "reference")
    sees = _who_sees(requests, slot)
    expected[sees, 2 * head : 2 * head + 2] = math.nan
    _put(batch, "value", slot, (head, 3), bad)
    torch.testing.assert_close(attend(batch, implementation), expected, equal_nan=True)


@given(given=_requests_and_slot(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), head=st.integers(0, 1))
@example(given=([Request(8, 1, prefix=2, dropped=frozenset({0, 1}))], 20), bad=math.inf, head=0)
@settings(max_examples=examples(40), deadline=None)
def check_key_element(implementation: str, given: tuple[list[Request], int], bad: float, head: int) -> None:
    """A score of -Inf has the weight 0 where keys themselves are not looked at; nothing else has."""
    requests, slot = given
    batch, sees = build(requests, Shape(poison=1e4)), _who_sees(requests, slot)
    _put(batch, "key", slot, (head, 3), math.copysign(1e30, bad))
    expected = attend(batch, "reference")  # a score that is very low has no weight, too
    _put(batch, "key", slot, (head, 3), bad)
    found = attend(batch, implementation)
    may_be_weightless = torch.zeros(found.shape[:2], dtype=torch.bool)
    if implementation not in ("reference", "native"):
        may_be_weightless = batch.query[:, :, 3] * bad == -math.inf
    reads = torch.zeros_like(may_be_weightless)
    reads[:, 2 * head : 2 * head + 2] = sees[:, None]
    expected[reads & (~may_be_weightless | found.isnan().all(-1))] = math.nan
    # the only key of a row had all the weight, very low as its score was; without a weight nothing is left
    expected[reads & may_be_weightless & ~found.isnan().all(-1) & _sees_one_token(batch)[:, None]] = 0.0
    torch.testing.assert_close(found, expected, equal_nan=True)


def _sees_one_token(batch: Batch) -> torch.Tensor:
    """bool [rows]: also where all other blocks of a request were dropped."""
    return torch.tensor([seen is not None and len(seen[0]) == 1 for seen in batch.seen])
