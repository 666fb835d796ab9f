"""What static shapes count while their buckets are warmed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.runner.static_shapes import StaticShapes


def test_what_a_failed_warm_up_compiled_is_no_steps() -> None:
    """covers: B10. The next step would be said to have compiled it."""
    counted = [0]
    device = SimpleNamespace(enter_thread=lambda: None, compilations=lambda: counted[0], synchronize=lambda: None)
    static: Any = SimpleNamespace(_device=device, stages=SimpleNamespace(warming=nullcontext), _compiled=0)

    def run() -> None:
        counted[0] += 3
        raise MemoryError

    with pytest.raises(MemoryError):
        StaticShapes._warm(static, run)
    assert static._compiled == 3
