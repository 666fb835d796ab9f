"""Helpers of `test_block_selection_choice.py` that other tests use, too."""

from __future__ import annotations

from hypothesis import strategies as st

# few distinct values, so that there are ties, and what other scores than a share of attention may be
SCORES = st.sampled_from([0.0, 0.125, 0.5, 1.0, -2.0, float("-inf"), float("inf"), -3.4e38])
