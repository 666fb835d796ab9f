"""Helpers of `test_experts.py` that other tests use, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_gaudi_ucm.vllm_api.moe import (
    MoEActivation,
)


def layer(activation: str, **config: Any) -> Any:
    numbers = {"has_bias": False, "swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None}
    config = {**numbers, **config}
    return SimpleNamespace(
        activation=MoEActivation.from_str(activation), moe_config=SimpleNamespace(**config), layer_name="model.layers.1"
    )
