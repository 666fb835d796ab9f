"""Device specs and model specs: the peak figures of a device and the sizes of a model that costs are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_gaudi_ucm.graphs.cost.compile_cost import CUDA_CAPTURE, GAUDI_COMPILE, NO_COMPILATION, CompileCost

GB = 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """Peaks of one device.

    flops: per second, in the type that weights have there.
    bandwidth: bytes per second of device memory.
    memory: bytes of device memory.
    launch_seconds: fixed cost of a replay, and of each attention part in it.
    compile_cost: of the compilation and capture of one new shape.
    graph_bytes: device memory of one captured graph, beside its activations.
    source: where they come from.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    launch_seconds: float
    compile_cost: CompileCost
    graph_bytes: float
    source: str


# vllm-gaudi, issue 1736: 300 buckets need 20 to 30 GiB while they are compiled.
GAUDI_GRAPH_BYTES = 85e6

DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("gaudi2", 432e12, 2.45e12, 96 * GB, 20e-6, GAUDI_COMPILE, GAUDI_GRAPH_BYTES, "vendor's papers"),
        DeviceSpec("gaudi3", 1835e12, 3.7e12, 128 * GB, 20e-6, GAUDI_COMPILE, GAUDI_GRAPH_BYTES, "vendor's papers"),
        DeviceSpec("h200", 989e12, 4.8e12, 141 * GB, 10e-6, CUDA_CAPTURE, 8e6, "vendor's data sheet, dense bf16"),
        DeviceSpec(
            "cpu",
            47e9,
            15e9,
            8 * GB,
            20e-6,
            NO_COMPILATION,
            0.0,
            "measured: fp32, two cores of a 2.6 GHz AMD EPYC, torch 2.13",
        ),
    )
}


@dataclass(frozen=True)
class ChipSpec:
    """What the cost of a stream of operators needs beyond `DeviceSpec`.

    on_chip: bytes of SRAM. vector: operations per second of the vector engines on two-byte elements.
    """

    on_chip: int
    vector: float


# Vendor's papers: 48 and 96 MB of SRAM; 11 and 28.7 TFLOPS in bfloat16, where a fused multiply-add counts as two.
CHIPS = {"gaudi2": ChipSpec(48_000_000, 5.5e12), "gaudi3": ChipSpec(96_000_000, 14.35e12)}


@dataclass(frozen=True)
class Work:
    """flops: of matrix products. bytes: to and from the device's memory. vector: elements of other arithmetic."""

    flops: float
    bytes: float
    vector: float = 0.0

    def seconds(self, device: DeviceSpec) -> float:
        """A lower bound of the time: that of the slowest engine, all working at once at their peaks."""
        chip = CHIPS[device.name]
        return max(self.flops / device.flops, self.bytes / device.bandwidth, self.vector / chip.vector)


def device_spec(name: str) -> DeviceSpec:
    """The spec of a device; an unknown name raises a ValueError that lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"device {name!r} is unknown, expected one of {', '.join(DEVICES)}") from None


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Families whose MLP is two matrices; the others have a gate and need three.
UNGATED = {"opt", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "starcoder2", "phi", "falcon", "bloom", "mpt"}
# The same size goes by other names in older families.
ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

MOST = 2**31 - 1  # of any size


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a dense decoder; `mlp_matrices` is 3 with a gate, 2 without."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int = 2
    mlp_matrices: int = 3

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The sizes in a `config.json`; a missing or impossible one raises a ValueError that names the key."""
        for key in EXPERT_KEYS:
            # one expert is none: configurations of dense models also carry the keys of their mixtures
            if config.get(key) not in (None, 0, 1):
                raise ValueError(f"model config: {key} is {config[key]!r}; only dense models have a cost model")
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        family = str(config.get("model_type", ""))
        default_inner = 4 * hidden if family == "gpt2" else None
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size", default_inner),
            heads=heads,
            kv_heads=_optional(config, "num_key_value_heads", heads),
            head_dim=_optional(config, "head_dim", hidden // heads),
            vocab=_size(config, "vocab_size"),
            dtype_bytes=_dtype_bytes(config),
            mlp_matrices=2 if family in UNGATED else 3,
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of one decoder layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of all linear layers and of the output head."""
        return (self.layers * self.layer_weights + self.hidden * self.vocab) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


# Sizes of Meta's Llama 3.1 8B, the model of plans that name none.
LLAMA_8B = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    for alias in ALIASES[name]:
        if config.get(alias) is not None:
            return _positive(alias, config[alias])
    if default is None:
        raise ValueError(f"model config: no {name}; expected the config.json of a decoder model")
    return default


def _optional(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return default if value is None else _positive(name, value)


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST:
        raise ValueError(f"model config: {name} is {str(value)[:40]!r}, expected an integer from 1 to {MOST}")
    return value


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"model config: dtype is {name!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
