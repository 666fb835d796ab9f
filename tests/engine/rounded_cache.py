"""An engine whose float32 cache holds what rows of 8-bit floats stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.serving import Engine
from vllm_gaudi_ucm.attention import backend, latent
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv, write_rows
from vllm_gaudi_ucm.ops.narrow_floats import narrow

STEPS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


@contextmanager
def rounding_engine(
    model: Path, scale: float = 1.0, ucm: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """scale: of the cache that it stands for. Graphs are captured with what it writes."""

    def meant(tokens: torch.Tensor) -> torch.Tensor:
        return narrow(tokens / scale).float() * scale

    def rows(tokens: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        return write_rows(meant(tokens), *places)

    def pairs(key: torch.Tensor, value: torch.Tensor, *places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return write_kv(meant(key), meant(value), *places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "write_rows", rows)
        patch.setattr(backend, "write_kv", pairs)
        with Engine(model, ucm, **{**STEPS, **options}) as engine:
            yield engine
