"""Experts of a model as far as costs depend on them: how many there are, how many a row takes, in how many layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")
SHARED_KEYS = ("shared_expert_intermediate_size", "shared_intermediate_size")
# inputs that share a scale in gpt-oss's checkpoints; two devices never share one
MXFP4_GROUP = 32


@dataclass(frozen=True)
class ExpertSpec:
    """Experts of the layers that have some, or one device's part of them.

    count: of a layer. chosen: of a row. inner: size of each. shared: size of what every row takes in addition.
    layers: that have experts; the others have a plain MLP. group: what sizes of experts on a device are multiples of.
    Quantised experts are counted as plain ones.
    """

    count: int
    chosen: int
    inner: int
    shared: int
    layers: int
    group: int = 1

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], layers: int) -> ExpertSpec | None:
        """Reads a model's configuration; None for a dense model. One expert counts as none, because configurations of
        dense models have keys of mixtures, too.

        Raises:
            ValueError: a size is missing or impossible; the message names the key.
        """
        key = next((key for key in EXPERT_KEYS if config.get(key) not in (None, 0, 1)), None)
        if key is None:
            return None
        count = _size(config, key)
        chosen_key = next((name for name in CHOSEN_KEYS if config.get(name) is not None), CHOSEN_KEYS[0])
        chosen = _size(config, chosen_key)
        if chosen > count:
            raise ValueError(f"model config: {chosen_key} is {chosen}, expected at most the {count} of {key}")
        own = "moe_intermediate_size" if config.get("moe_intermediate_size") is not None else "intermediate_size"
        inner = _size(config, own)
        shared_key = next((key for key in SHARED_KEYS if config.get(key)), None)
        if shared_key is not None:
            shared = _size(config, shared_key)
        else:
            shared = _size(config, "n_shared_experts") * inner if config.get("n_shared_experts") else 0
            if config.get("model_type") == "llama4_text":
                shared = inner
            elif config.get("model_type") == "gemma4_text":
                # every layer has a plain MLP, too
                shared = _size(config, "intermediate_size")
        quantised = config.get("quantization_config") or {}
        group = MXFP4_GROUP if quantised.get("quant_method") == "mxfp4" else 1
        return cls(count, chosen, inner, shared, layers=_layers(config, layers), group=group)

    def shard(self, tensor: int, layers: int) -> ExpertSpec:
        """Returns the part of one of `tensor` devices, with this many of the model's layers. Whether devices share out
        each expert or whole experts, each has as many weights, and reads as many on average.
        """
        inner, shared = -(-self.inner // (tensor * self.group)) * self.group, -(-self.shared // tensor)
        return replace(self, inner=inner, shared=shared, layers=min(self.layers, layers))

    @property
    def weights(self) -> int:
        """Returns the sizes of all experts of a layer together."""
        return self.count * self.inner + self.shared

    def computed(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Returns the sizes that rows are multiplied with, together."""
        return np.asarray(rows, np.float64) * (self.chosen * self.inner + self.shared)

    def read(self, rows: ArrayLike) -> NDArray[np.float64]:
        """The sizes of the experts that rows take if they choose independently and evenly, which is the most."""
        missed = (1.0 - self.chosen / self.count) ** np.asarray(rows, np.float64)
        return self.count * self.inner * (1.0 - missed) + self.shared


def _layers(config: Mapping[str, Any], layers: int) -> int:
    """Returns how many of the layers have experts."""
    first = config.get("first_k_dense_replace") or 0
    from_one = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step")
    every = from_one or config.get("moe_layer_freq") or 1
    plain = config.get("mlp_only_layers") or []
    if type(first) is not int or type(every) is not int or every < 1 or not isinstance(plain, list):
        # another way to write it: as if all had
        return layers
    # Qwen and Llama count layers from 1, DeepSeek from 0
    shift = 1 if from_one else 0
    return sum(layer >= first and (layer + shift) % every == 0 and layer not in plain for layer in range(layers))


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, list) and value:
        # Hunyuan has one for each layer
        return max(_size({key: one}, key) for one in value)
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"model config: {key} is {str(value)[:40]!r}, expected an integer from 1 to {2**31 - 1}")
    return value
