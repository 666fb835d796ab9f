"""Rows of a step that see each other in both directions, as attention layers read them."""

from __future__ import annotations

import torch


class StepSpans:
    """The spans of a step's rows, which layers read while the model computes.

    Args:
        longest: rows of the longest span.
        in_windows: only layers with a window see both ways.
        captured: forwards are captured at static shapes, so all of them with new tokens compute spans. Otherwise a step
            without spans computes none.

    current: int64 [rows], the span of each row, 0 for none; None: the step has none.
    """

    def __init__(self, longest: int, *, captured: bool, in_windows: bool = False) -> None:
        self.longest = longest
        self.in_windows = in_windows
        self._captured = captured
        self.current: torch.Tensor | None = None

    def begin(self, rows: torch.Tensor) -> None:
        """Begins a forward. rows: int64 [rows], as `current`."""
        self.current = rows if self._captured or bool(rows.any()) else None
