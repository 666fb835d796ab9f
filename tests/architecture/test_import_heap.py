"""Of the collections that an engine asks for in a test, those of vLLM look at nothing; all others do."""

from __future__ import annotations

import gc
import weakref
from typing import Any


class Node:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_vllm_does_not_collect() -> None:
    """The plugin's own call, whose module's name begins alike, does."""
    code = compile("gc.collect()", "collects", "exec")
    left = []
    for module in ("vllm.model_executor.model_loader", "vllm_gaudi_ucm.device"):
        node = weakref.ref(Node())
        namespace: dict[str, Any] = {"__name__": module, "gc": gc}
        exec(code, namespace)
        left.append(node() is not None)
    assert left == [True, False]
