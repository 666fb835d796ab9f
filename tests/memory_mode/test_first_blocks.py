"""Which blocks a first step can do without."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.memory_mode.placement import dispensable_blocks
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions

OPTIONS = GsaOptions(min_tokens=32, sparse_ratio=0.2, min_blocks=2, init_window_sz=1, local_window_sz=2)
BLOCK = 16


@pytest.mark.parametrize(("ratio", "count"), [(0.2, 16), (0.4, 12), (0.45, 11), (1.0, 0)])
def test_as_many_stay_as_memory_mode_would_release(ratio: float, count: int) -> None:
    found = dispensable_blocks(20, range(20), BLOCK, ratio, OPTIONS)
    assert found == [*range(17, 17 - count, -1)][:count]


def test_sinks_and_window_are_never_dispensable() -> None:
    found = dispensable_blocks(20, range(19, -1, -1), BLOCK, 0.2, OPTIONS)
    assert not {0, 18, 19} & set(found)
    assert found[:3] == [1, 2, 3], "least wanted first"


def test_what_is_on_the_device_counts() -> None:
    """Ten blocks are there, of which nine are not windows; five more may be."""
    assert dispensable_blocks(20, range(10, 20), BLOCK, 0.85, OPTIONS) == [17, 16, 15]
    assert dispensable_blocks(20, range(10, 20), BLOCK, 0.2, OPTIONS) == [*range(17, 9, -1)]


@pytest.mark.parametrize("full", [0, 1, 3])
def test_a_dense_step_needs_everything(full: int) -> None:
    assert dispensable_blocks(full, range(full), BLOCK, 0.2, OPTIONS) == []


def test_a_context_may_be_sparse_by_its_last_token() -> None:
    options = OPTIONS.model_copy(update={"min_tokens": 10 * BLOCK + 1})
    assert dispensable_blocks(10, range(10), BLOCK, 0.2, options)
    assert not dispensable_blocks(9, range(9), BLOCK, 0.2, options)
