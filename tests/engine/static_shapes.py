"""Helpers of `test_static_shapes.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

from tests.engine.serving import Engine
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes


def static(warm_up: str = "full", **graphs: Any) -> dict[str, Any]:
    return {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 10, "warm_up": warm_up, **graphs}}


def shapes(engine: Engine) -> StaticShapes:
    found = engine.runner.static
    assert found is not None
    return found
