"""Engines that are stopped, and checked, when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions

MakeEngine = Callable[..., PrefetchEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """`make_engine(store, option=value, ..., clock=...)`: a started engine."""
    made: list[tuple[PrefetchEngine, ScriptedStore]] = []

    def make(store: ScriptedStore, *, clock: Callable[[], float] | None = None, **options: Any) -> PrefetchEngine:
        extra = {} if clock is None else {"clock": clock}
        engine = PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(**options), **extra)
        engine.start()
        made.append((engine, store))
        return engine

    yield make
    for engine, store in made:
        engine.check_integrity()
        store.gate.set()
        assert engine.stop(10)
        engine.check_integrity()
        assert engine.stats().threads == 0
        assert engine.stats().pending == 0
