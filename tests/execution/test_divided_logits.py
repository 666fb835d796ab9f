"""Logits of a step that ran in parts stand in the order of the sampler's slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.execution.divided_logits import DividedLogits

BUCKETS = (2, 5, 12)
WIDTH = 3


def bucket_of(count: int) -> int:
    return next((bucket for bucket in BUCKETS if bucket >= count), 0) if count else 0


class Divided:
    """DividedLogits over an execution of three logits buckets, and the stages that it entered."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        execution: Any = SimpleNamespace(max_logits=BUCKETS[-1], logits_width=WIDTH, logits_bucket=bucket_of)
        self.logits = DividedLogits(execution, torch.device("cpu"), self._stage)

    @contextmanager
    def _stage(self, label: str) -> Iterator[None]:
        self.stages.append(label)
        yield

    def run(self, parts: list[list[int]]) -> torch.Tensor:
        """Each part's rows are full of their slots' numbers, its pads of NaN. The logits after the last part."""
        count = sum(map(len, parts))
        for slots in parts:
            rows = torch.full((bucket_of(len(slots)), WIDTH), np.nan)
            rows[: len(slots)] = torch.tensor(slots, dtype=torch.float32)[:, None]
            found = self.logits.put(rows, np.array(slots, np.int64), count)
        assert len(found) == bucket_of(count)
        return found[:count]


@st.composite
def divisions(draw: st.DrawFn) -> list[list[int]]:
    """Slots 0 to n in any order, cut anywhere; a part may be a prompt chunk that yields nothing."""
    slots = draw(st.permutations(range(draw(st.integers(0, BUCKETS[-1])))))
    cuts = sorted(draw(st.lists(st.integers(0, len(slots)), max_size=4)))
    return [list(slots[lo:hi]) for lo, hi in zip([0, *cuts], [*cuts, len(slots)], strict=True)]


@given(st.lists(divisions(), min_size=1, max_size=3))
def test_each_slot_gets_its_own_row_whatever_came_before(steps: list[list[list[int]]]) -> None:
    """covers: A9 D7. Several steps through one buffer, pads of every part full of NaN."""
    divided = Divided()
    for parts in steps:
        assert divided.run(parts).tolist() == [[float(slot)] * WIDTH for slot in range(sum(map(len, parts)))]


def test_warming_a_number_of_rows_changes_no_slot() -> None:
    """An idle warm-up may run between the parts' step and nothing else, but must never depend on that. covers: A9"""
    divided = Divided()
    before = divided.run([[1], [0, 2]]).clone()
    divided.logits.warm(torch.full((12, WIDTH), np.nan))
    assert torch.equal(divided.logits.put(torch.zeros(0, WIDTH), np.zeros(0, np.int64), 3)[:3], before)


@pytest.mark.parametrize(("parts", "stages"), [([[0, 1], [2]], 2), ([[], [0]], 1), ([[], []], 0)])
def test_a_part_without_logits_does_nothing_on_the_device(parts: list[list[int]], stages: int) -> None:
    divided = Divided()
    divided.run(parts)
    assert divided.stages == ["divided logits"] * stages


@given(st.lists(divisions(), min_size=1, max_size=3))
def test_drafts_have_a_buffer_for_each_position(parts: list[list[list[int]]]) -> None:
    """Positions are put part by part, and taken in any order. covers: A9"""
    divided = Divided()
    divided.logits.reserve(len(parts) - 1)
    for position, slots in enumerate(parts):
        for part in slots:
            rows = torch.full((bucket_of(len(part)), WIDTH), np.nan)
            rows[: len(part)] = torch.tensor(part, dtype=torch.float32)[:, None] * 10 + position
            divided.logits.put(rows, np.array(part, np.int64), sum(map(len, slots)), position)
    for position, slots in enumerate(parts):
        order = [slot for part in slots for slot in part]
        found = divided.logits.logits_of(np.array(order, np.int64), position)
        assert len(found) == bucket_of(len(order))
        assert found[: len(order), 0].tolist() == [slot * 10.0 + position for slot in order]
