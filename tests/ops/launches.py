"""Kernels of Triton: one that is launched nowhere, and what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Launches:
    """Stands for a kernel: remembers the grids that it is launched with, and launches nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *_, **__: None

    def assert_allowed(self) -> None:
        """CUDA C++ Programming Guide, compute capabilities: 2^31 - 1 programs on the first axis, 65,535 on others."""
        assert self.grids
        for first, *others in self.grids:
            assert 0 < first < 1 << 31
            assert all(0 < size <= 65_535 for size in others)


@contextmanager
def launched() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Name and grid of every kernel that is launched inside, in this order; the kernels run."""
    found: list[tuple[str, tuple[int, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (JITFunction, InterpretedFunction):
            plain: Any = kind.run

            def run(self: Any, *arguments: Any, grid: Any, _plain: Any = plain, **named: Any) -> Any:
                found.append((self.fn.__name__, tuple(grid)))
                return _plain(self, *arguments, grid=grid, **named)

            patch.setattr(kind, "run", run)
        yield found
