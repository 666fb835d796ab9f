"""Layers that keep a state for each running request: how many there are, and the size of their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONVOLUTIONS = {"lfm2", "lfm2_moe"}
PARALLEL = {"falcon_h1"}
"""Families whose layers all have attention as well as a state."""
MAMBA = {"granitemoehybrid", "nemotron_h", *PARALLEL}
WIDE_STATES = {"nemotron_h"}
"""Families for which vLLM takes float32 states by default."""


@dataclass(frozen=True)
class StateSpec:
    """Sizes of the states on one device.

    layers: layers with a state. attending: layers with attention. bytes_each: bytes of a request's state in one layer.
    """

    layers: int
    attending: int
    bytes_each: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], layers: int, dtype_bytes: int) -> StateSpec | None:
        """Reads a model's configuration; returns None if no layer keeps a state that the engine serves."""
        family = str(config.get("model_type", ""))
        if family not in CONVOLUTIONS | MAMBA:
            return None
        kinds = kinds_of_layers(config) or ["full_attention"] * layers
        attending = sum(kind in ("full_attention", "attention", "*") for kind in kinds)
        if family in CONVOLUTIONS:
            rows = int(config["conv_L_cache"]) - 1
            return cls(layers - attending, attending, rows * int(config["hidden_size"]) * dtype_bytes)
        states = layers if family in PARALLEL else sum(kind in ("linear_attention", "mamba", "M") for kind in kinds)
        return cls(states, layers if family in PARALLEL else attending, _mamba_bytes(config, family, dtype_bytes))

    def shard(self, tensor: int, pipeline: int) -> StateSpec:
        """Returns the largest part that a device has; groups fewer than devices are counted as if they were divided."""
        layers, attending = -(-self.layers // pipeline), -(-self.attending // pipeline)
        return StateSpec(layers, attending, -(-self.bytes_each // tensor))

    def bytes_of(self, requests: int, drafts: int = 0) -> int:
        """Returns the bytes of so many running requests, a state for each of their drafts and one more."""
        # a state for pads, and one of zeros
        return self.layers * self.bytes_each * (requests * (1 + drafts) + 2)


def kinds_of_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Returns the kind of each layer; None if the configuration does not name them."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    return None if kinds is None else list(kinds)


def _mamba_bytes(config: Mapping[str, Any], family: str, dtype_bytes: int) -> int:
    names = {
        "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    }.get(family, ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    heads, head_dim, groups, state, width = (int(config[name]) for name in names)
    convolved = heads * head_dim + 2 * groups * state
    of_state = 4 if family in WIDE_STATES else dtype_bytes
    return (width - 1) * convolved * dtype_bytes + heads * head_dim * state * of_state
