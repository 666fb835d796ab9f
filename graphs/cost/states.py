"""Layers that keep a state for each running request: how many there are, and the sizes of their states and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONVOLUTIONS = {"lfm2", "lfm2_moe"}
PARALLEL = {"falcon_h1"}
"""Families whose layers all have attention as well as a state."""
MAMBA = {"granitemoehybrid", "nemotron_h", *PARALLEL}
DELTAS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
WIDE_STATES = {"nemotron_h", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families for which vLLM takes float32 states by default."""


@dataclass(frozen=True)
class StateSpec:
    """Sizes of the states on one device.

    layers: layers with a state. attending: layers with attention. bytes_each: bytes of a request's state in one layer.
    weights: of the linear layers of a layer with a state, in place of attention's, or in addition in a parallel family.
    """

    layers: int
    attending: int
    bytes_each: int
    weights: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], layers: int, dtype_bytes: int) -> StateSpec | None:
        """Reads a model's configuration; returns None if no layer keeps a state that the engine serves."""
        family = str(config.get("model_type", ""))
        if family not in CONVOLUTIONS | MAMBA | DELTAS:
            return None
        kinds = kinds_of_layers(config)
        if kinds is None and family in DELTAS:
            interval = int(config.get("full_attention_interval") or 4)
            kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
        kinds = kinds or ["full_attention"] * layers
        attending = sum(kind in ("full_attention", "attention", "*") for kind in kinds)
        states = sum(kind in ("linear_attention", "mamba", "M", "conv") for kind in kinds)
        if family in PARALLEL:
            states = attending = layers
        read = _convolution if family in CONVOLUTIONS else _delta if family in DELTAS else _mamba
        return cls(states, attending, *read(config, family, dtype_bytes))

    def shard(self, tensor: int, pipeline: int) -> StateSpec:
        """Returns the largest part that a device has; groups fewer than devices are counted as if they were divided."""
        layers, attending = -(-self.layers // pipeline), -(-self.attending // pipeline)
        return StateSpec(layers, attending, -(-self.bytes_each // tensor), -(-self.weights // tensor))

    def bytes_of(self, requests: int, drafts: int = 0, kept: int = 0) -> int:
        """Returns the bytes of so many running requests, a state for each of their drafts and one more.

        kept: states that are kept for prefix caching.
        """
        # a state for pads, and one of zeros
        return self.layers * self.bytes_each * (requests * (1 + drafts) + kept + 2)


def kinds_of_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Returns the kind of each layer; None if the configuration does not name them."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    return None if kinds is None else list(kinds)


def _convolution(config: Mapping[str, Any], family: str, dtype_bytes: int) -> tuple[int, int]:
    """(bytes of a state, weights of a layer)."""
    hidden = int(config["hidden_size"])
    return (int(config["conv_L_cache"]) - 1) * hidden * dtype_bytes, 4 * hidden * hidden


def _mamba(config: Mapping[str, Any], family: str, dtype_bytes: int) -> tuple[int, int]:
    names = {
        "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    }.get(family, ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    heads, head_dim, groups, state, width = (int(config[name]) for name in names)
    inner, convolved = heads * head_dim, heads * head_dim + 2 * groups * state
    weights = int(config["hidden_size"]) * (convolved + 2 * inner + heads)
    return _bytes(convolved * (width - 1), inner * state, family, dtype_bytes), weights


def _delta(config: Mapping[str, Any], family: str, dtype_bytes: int) -> tuple[int, int]:
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    key_heads, key_dim, heads, value_dim = (int(config[name]) for name in names)
    convolved, inner = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim
    weights = int(config["hidden_size"]) * (convolved + 2 * inner + 2 * heads)
    kept = convolved * (int(config["linear_conv_kernel_dim"]) - 1)
    return _bytes(kept, inner * key_dim, family, dtype_bytes), weights


def _bytes(convolved: int, state: int, family: str, dtype_bytes: int) -> int:
    return convolved * dtype_bytes + state * (4 if family in WIDE_STATES else dtype_bytes)
