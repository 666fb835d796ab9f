"""A kernel of Triton that is launched nowhere."""

from __future__ import annotations

from collections.abc import Callable


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
