"""`torch.compile` with static shapes: `hpu_backend` in Gaudi's compile mode, inductor elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

# One entry per bucket is what static shapes mean; dynamo's default of 8 would send the ninth bucket to eager mode.
MOST_SHAPES = 4096
HPU_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"force_static_compile": True}


def compile_static(function: F, backend: str) -> F:
    """The function, compiled once for each set of input shapes; the first call with a set compiles.

    backend: dynamo's name of it, `hpu_backend` or `inductor`.
    """
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES
    options = HPU_OPTIONS if backend == "hpu_backend" else None
    return cast(F, torch.compile(function, backend=backend, dynamic=False, options=options))
