"""Functions compiled for the simulated card, each as if dynamo had just started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(run: Callable[..., Any], fullgraph: bool = True, dynamic: bool | None = False, **options: Any) -> Any:
    """One region. options: of `hpu_backend`; sizes are static unless they say otherwise."""
    torch._dynamo.reset()
    return torch.compile(
        run,
        backend="hpu_backend",
        dynamic=dynamic,
        fullgraph=fullgraph,
        options={"force_static_compile": True, **options},
    )
