"""An engine whose float32 cache holds what rows of 8-bit floats stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.serving import Answer, Engine, assert_same
from vllm_gaudi_ucm.attention import backend, latent
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv, write_rows
from vllm_gaudi_ucm.ops.narrow_floats import narrow

STEPS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
# Steps that call what writes the cache: nothing is captured or compiled.
CALLED: dict[str, Any] = {"graphs": {"mode": "off"}, "cpu": {"native_graphs": False}}
# How near to the middle of two 8-bit floats, relative to itself, a number is that may be rounded to either of them:
# both engines compute it in float32, one with attention over 8-bit rows, the other over float32 ones.
MIDDLE = 1e-5
Rows = Callable[[torch.Tensor], torch.Tensor]


class RoundedRows:
    """What an engine with a cache of 8-bit floats has written, in order, for one that follows it."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self.others = 0
        """Numbers that the follower would have rounded the other way."""

    def record(self, rows: torch.Tensor) -> torch.Tensor:
        self._rows.append(rows.float().clone())
        return rows

    def follow(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows as they were recorded. Raises AssertionError where another row than `tokens` rounds to was."""
        found, own = self._rows.pop(0), narrow(tokens).float()
        assert found.shape == own.shape, f"rows of {tuple(own.shape)} are written, {tuple(found.shape)} were"
        differs = found != own
        middle = ((found + own) / 2)[differs]
        numbers = tokens[differs]
        most = float(((numbers - middle).abs() / middle.abs()).amax()) if len(middle) else 0.0
        assert most <= MIDDLE, f"a number {most:.1e} of itself from the middle of two 8-bit floats became the other one"
        self.others += len(middle)
        return found

    def check_all_followed(self) -> None:
        assert not self._rows, f"{len(self._rows)} more rows were written than the other engine writes"


@contextmanager
def _writes(changed: Rows) -> Iterator[None]:
    def rows(tokens: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        return write_rows(changed(tokens), *places)

    def pairs(key: torch.Tensor, value: torch.Tensor, *places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return write_kv(changed(key), changed(value), *places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "write_rows", rows)
        patch.setattr(backend, "write_kv", pairs)
        yield


@contextmanager
def rounding_engine(
    model: Path, scale: float = 1.0, ucm: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """scale: of the cache that it stands for. Graphs are captured with what it writes."""

    def meant(tokens: torch.Tensor) -> torch.Tensor:
        return narrow(tokens / scale).float() * scale

    with _writes(meant), Engine(model, ucm, **{**STEPS, **options}) as engine:
        yield engine


def assert_follows(model: Path, prompts: list[list[int]], length: int, **options: Any) -> int:
    """Answers from a cache of 8-bit floats are those of a float32 cache with the same numbers, and each of these is the
    8-bit float next to what the second engine computes; next to the middle of two it may be either.

    How many are the other one. Both run each step at its true shape.
    """
    rows = RoundedRows()
    with _writes(rows.record), Engine(model, CALLED, kv_cache_dtype="fp8", **{**STEPS, **options}) as engine:
        found: list[Answer] = engine.greedy(prompts, length)
    with _writes(rows.follow), Engine(model, CALLED, **{**STEPS, **options}) as engine:
        assert_same(found, engine.greedy(prompts, length))
    rows.check_all_followed()
    return rows.others
