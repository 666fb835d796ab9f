"""Sliding windows and soft caps: the reference against a float64 oracle, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.oracle import assert_matches
from tests.ops.test_unified_attention import COMMON, MIXED, shapes
from vllm_gaudi_ucm.ops.unified_attention.api import unified_attention
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import SharedPart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec


def windowed(plain: Batch, window: int, block_size: int) -> Batch:
    """The batch for a layer with a window: ranges begin where the window of each row does, and less is seen."""
    owner = [index for index, request in enumerate(plain.requests) for _ in range(request.new)]
    position = [request.cached + row for request in plain.requests for row in range(request.new)]

    def first_seen(row: int, block: int) -> int:
        """In the tokens of a block that the row's request has."""
        return max(0, position[row] - window + 1 - plain.tables[owner[row]].index(block) * block_size)

    shared, unique = plain.parts.shared, plain.parts.unique
    if shared is not None:
        rows = len(plain.seen)
        lo, hi = shared.lo[shared.row_spans].clone(), shared.hi[shared.row_spans].clone()
        for row in range(len(owner)):
            for column, block in enumerate(shared.blocks.tolist()):
                if hi[row, column]:
                    lo[row, column] = first_seen(row, block)
        shared = SharedPart(shared.blocks, torch.arange(rows), lo, hi, shared.groups)
    if unique is not None:
        lo = unique.lo.clone()
        for entry, row in enumerate(unique.rows.tolist()):
            if unique.hi[entry]:
                lo[entry] = first_seen(row, entry if unique.blocks is None else int(unique.blocks[entry]))
        unique = unique._replace(lo=lo)
    seen = [None if pair is None else (pair[0][-window:], pair[1][-window:]) for pair in plain.seen]
    parts = plain.parts._replace(shared=shared, unique=unique)
    return replace(plain, parts=parts, seen=seen, spec=replace(plain.spec, sliding_window=window))


@given(shape=shapes(), window=st.integers(1, 24), data=st.data())
@COMMON
def test_a_window_equals_its_definition(shape: Shape, window: int, data: st.DataObject) -> None:
    requests = data.draw(requests_strategy(shape.block_size))
    assert_matches(windowed(build(requests, shape), window, shape.block_size), "reference")


@pytest.mark.parametrize("cap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_a_soft_cap_equals_its_definition(cap: float, dtype: torch.dtype, window: int | None) -> None:
    """Of scores that are far beyond the cap, with a window and without one."""
    batch = build(MIXED, Shape(dtype=dtype))
    batch.query *= 8
    batch.spec = replace(batch.spec, logits_soft_cap=cap)
    assert_matches(batch if window is None else windowed(batch, window, 4), "reference")


def test_a_soft_cap_reaches_selected_blocks() -> None:
    batch = build([Request(14, 1, chosen=frozenset({0, 2})), Request(9, 3, chosen=frozenset({1}))], Shape())
    batch.query *= 8
    batch.spec = replace(batch.spec, logits_soft_cap=1.5)
    assert_matches(batch, "reference")


def test_what_only_the_reference_computes_is_its_work() -> None:
    batch = build(MIXED, Shape(poison=0.0))
    batch.spec = replace(batch.spec, logits_soft_cap=2.0)
    assert_matches(batch, "auto")
    others = [name for name in ATTENTION.names() if name != "reference"]
    assert not any(ATTENTION.make(name).supports(batch.spec) for name in others)
    for name in ("cpu", "hpu"):
        tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
        with pytest.raises(
            ValueError, match=rf"'{name}' cannot be used here \(it does not compute logits_soft_cap=2.0"
        ):
            unified_attention(*tensors, batch.parts, batch.spec, implementation=name)


def test_a_window_with_a_selected_part_is_refused() -> None:
    batch = build([Request(14, 1, chosen=frozenset({0}))], Shape())
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    with pytest.raises(ValueError, match="found a selected part with a sliding window"):
        unified_attention(*tensors, batch.parts, replace(batch.spec, sliding_window=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0, expected a positive number"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(0.25, **change)
    assert AttentionSpec(0.25).is_plain
