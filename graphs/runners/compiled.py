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
    """The function, compiled once for each set of input shapes; the first call with a set compiles, in any thread.

    backend: dynamo's name of it, `hpu_backend` or `inductor`.
    """
    options = HPU_OPTIONS if backend == "hpu_backend" else None
    compiled = torch.compile(function, backend=backend, dynamic=False, options=options)

    def call(*inputs: Any, **named: Any) -> Any:
        # what is set in one thread is not set in another (torch 2.13), and buckets are warmed in a thread of their own
        if torch._dynamo.config.recompile_limit < MOST_SHAPES:
            _allow_many_shapes()
        return compiled(*inputs, **named)

    return cast(F, call)


def _allow_many_shapes() -> None:
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES
