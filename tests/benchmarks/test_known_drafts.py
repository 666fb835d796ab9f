"""Drafts of a known rate: right where they are said to be, and a function of the tokens alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.known_drafts import KnownDrafts, first_wrong

VOCAB = 4096
REQUESTS, DRAFTS = 2000, 4


def proposed(acceptance: float) -> tuple[np.ndarray, list[list[int]]]:
    """The last token of each request, and its drafts."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (REQUESTS, 8))
    table = SimpleNamespace(token_ids=tokens, num_tokens=np.full(REQUESTS, 6))
    step = SimpleNamespace(
        requests=[SimpleNamespace(row=row) for row in range(REQUESTS)], wanted=np.full(REQUESTS, DRAFTS)
    )
    return tokens[:, 5], KnownDrafts(cast(Any, table), VOCAB, acceptance).propose(cast(Any, step))


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_each_place_has_the_rate(acceptance: float) -> None:
    last, drafts = proposed(acceptance)
    right = np.array(drafts) == (last[:, None] + 1 + np.arange(DRAFTS)) % VOCAB
    assert right.mean(0) == pytest.approx(acceptance, abs=0.04)
    # of several in a row: places do not depend on each other
    accepted = right.cumprod(1).sum(1).mean()
    assert accepted == pytest.approx(sum(acceptance**n for n in range(1, DRAFTS + 1)), abs=0.1)
    assert proposed(acceptance)[1] == drafts


def test_no_more_than_wanted_and_the_first_wrong_token() -> None:
    table = SimpleNamespace(token_ids=np.array([[5, VOCAB - 1, 0], [7, 9, 0]]), num_tokens=np.array([2, 2]))
    step = SimpleNamespace(requests=[SimpleNamespace(row=1), SimpleNamespace(row=0)], wanted=np.array([0, 3]))
    assert KnownDrafts(cast(Any, table), VOCAB, 1.0).propose(cast(Any, step)) == [[], [0, 1, 2]]
    assert first_wrong([3, VOCAB - 1], [0, 1, 2], VOCAB) is None
    assert first_wrong([3, 5], [6, 8, 8], VOCAB) == 1
