"""Device specs and model specs: the peak figures of a device and the sizes of a model, as the basis of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_gaudi_ucm.graphs.cost.experts import ExpertSpec
from vllm_gaudi_ucm.graphs.cost.states import StateSpec, kinds_of_layers

GB = 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """Peaks of one device.

    flops: per second, in the dtype of weights there.
    bandwidth: bytes per second of device memory.
    memory: bytes of device memory.
    launch_seconds: fixed cost of a replay, and of each attention part in it.
    source: origin of the figures.
    link: bytes per second that a device sends to the others of its machine, and receives at the same time.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    launch_seconds: float
    source: str
    link: float


# 21 of the 24 Ethernet ports, of 100 and 200 Gbit/s, go to the other seven cards of a machine.
PAPERS = "vendor's papers"

DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("gaudi2", 432e12, 2.45e12, 96 * GB, 20e-6, PAPERS, 262.5e9),
        DeviceSpec("gaudi3", 1835e12, 3.7e12, 128 * GB, 20e-6, PAPERS, 525e9),
        DeviceSpec("h200", 989e12, 4.8e12, 141 * GB, 10e-6, "vendor's data sheet, dense bf16", 450e9),
        DeviceSpec(
            "cpu",
            47e9,
            15e9,
            8 * GB,
            20e-6,
            "measured: fp32, two cores of a 2.6 GHz AMD EPYC, torch 2.13",
            5e9,
        ),
    )
}


# Whose figures stand for a device that has no entry of its own.
DEFAULT_SPECS = {"hpu": "gaudi2", "cuda": "h200", "cpu": "cpu"}


@dataclass(frozen=True)
class ChoiceSpec:
    """The cost of choosing blocks in a step, in addition to reading their summaries; see `sparse.choice_cost`.

    layer_seconds: for each layer that chooses. step_seconds: for the step, on the host. sign_bytes: bytes that
    take as long to read as an operation with one sign of a code, in addition to the bytes of the code.
    """

    layer_seconds: float
    step_seconds: float
    source: str
    sign_bytes: float = 0.0


# Bytes for each operation of a score: a sign takes two, and is written and read as float32.
WRITTEN_OUT = 4.0

CHOICES = {
    "gaudi2": ChoiceSpec(60e-6, 2e-4, "modelled: three parts' launches; not measured", WRITTEN_OUT),
    "gaudi3": ChoiceSpec(60e-6, 2e-4, "modelled: three parts' launches; not measured", WRITTEN_OUT),
    "h200": ChoiceSpec(
        30e-6,
        2e-4,
        "benchmarks.sparse_device, 2026-11-21: 0.03 ms in addition to the bytes, 1 x 32K",
        # 264,000 operations for each of 2,048 blocks took 55 us, 2026-11-29
        0.45,
    ),
    # these steps are not replayed without Python, unlike dense ones
    "cpu": ChoiceSpec(4e-4, 1e-3, "benchmarks.sparse_engine --device cpu --always, 2026-11-23"),
}


def device_spec(name: str) -> DeviceSpec:
    """Returns the spec of a device; an unknown name raises a ValueError that lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"device {name!r} is unknown, expected one of {', '.join(DEVICES)}") from None


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Families whose MLP is two matrices; the others have a gate and need three.
UNGATED = {
    *("opt", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "starcoder2", "phi", "falcon", "bloom", "mpt"),
    *("bert", "roberta", "xlm-roberta"),
}
# Older families use other names for the same size.
ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    # in Llama 4, `intermediate_size` is an expert's size
    "intermediate_size": ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
}
# Families whose KV cache has one latent per token; others with the same keys cache the keys and values computed from
# it.
LATENT = {
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "pangu_ultra_moe",
}  # fmt: skip

MOST = 2**31 - 1  # of any size


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of multi-head latent attention. rank: elements cached for a token in addition to `rotary` elements, for all
    heads.
    nope, value: elements of a head's key without its rotary part, and of its value. query_rank: elements from
    which queries are made; 0: from the hidden states.
    chosen: most tokens that each row attends to, by the scores of indexers (DSA); 0: all. indexers: layers with one.
    index: elements of an indexer's key, which is cached for each token.
    """

    rank: int
    rotary: int
    nope: int
    value: int
    query_rank: int = 0
    chosen: int = 0
    indexers: int = 0
    index: int = 0

    def shard(self, pipeline: int) -> LatentSpec:
        """Returns the largest part of a stage; each device has whole indexers."""
        return replace(self, indexers=-(-self.indexers // pipeline))

    def weights(self, hidden: int, heads: int) -> int:
        """Returns the weights of the linear layers around attention."""
        key = self.nope + self.rotary
        query = (hidden + heads * key) * self.query_rank if self.query_rank else hidden * heads * key
        made = self.rank * heads * (self.nope + self.value)
        return query + hidden * (self.rank + self.rotary) + made + hidden * heads * self.value


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder, or of one device's part of it; `mlp_matrices` is 3 with a gate, 2 without.

    tensor: devices that share each layer and add up their results. experts: None without a mixture of experts.
    window_layers: number of layers whose rows see `window` tokens, or chunks of this many; the others see all.
    states: layers that keep a state for each request; None if there are none.
    latent: None if keys and values of each head are cached. With it there is one KV head, whose key of `head_dim`
        elements holds its value.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int = 2
    mlp_matrices: int = 3
    tensor: int = 1
    experts: ExpertSpec | None = None
    window_layers: int = 0
    window: int = 0
    latent: LatentSpec | None = None
    states: StateSpec | None = None

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Reads the sizes in a `config.json`; a missing or impossible one raises a ValueError that names the key."""
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        # Nemotron-H counts its layers by their kinds alone
        kinds = kinds_of_layers(config)
        layers = _size(config, "num_hidden_layers", None if kinds is None else len(kinds))
        experts = ExpertSpec.from_hf_config(config, layers)
        family = str(config.get("model_type", ""))
        default_inner = 4 * hidden if family in ("gpt2", "bloom", "mpt") else None
        window_layers, window = _windows(config, layers)
        latent = _latent(config) if family in LATENT and config.get("kv_lora_rank") else None
        cached = hidden // heads if latent is None else latent.rank + latent.rotary
        return cls(
            layers=layers,
            window_layers=window_layers,
            window=window,
            hidden=hidden,
            intermediate=_size(config, "intermediate_size", default_inner if experts is None else experts.inner),
            heads=heads,
            kv_heads=_optional(config, "num_key_value_heads", heads) if latent is None else 1,
            head_dim=_optional(config, "head_dim", cached) if latent is None else cached,
            vocab=_size(config, "vocab_size"),
            dtype_bytes=_dtype_bytes(config),
            mlp_matrices=2 if family in UNGATED else 3,
            experts=experts,
            latent=latent,
            states=StateSpec.from_hf_config(config, layers, _dtype_bytes(config)),
        )

    def shard(self, tensor: int, pipeline: int = 1) -> ModelSpec:
        """Returns the largest part that a device has if `tensor` of them share a layer, in `pipeline` stages of layers.

        KV heads are replicated if there are fewer of them than devices.

        Raises:
            ValueError: devices cannot share the sizes evenly; the message names the option.
        """
        if tensor < 1 or self.heads % tensor or max(self.kv_heads, tensor) % min(self.kv_heads, tensor):
            raise ValueError(
                f"--tensor-parallel-size is {tensor}, expected a number that {self.heads} heads can be divided by, and "
                f"that divides {self.kv_heads} KV heads or is a multiple of them"
            )
        if not 1 <= pipeline <= self.layers:
            raise ValueError(f"--pipeline-parallel-size is {pipeline}, expected 1 to {self.layers}, a layer each")
        layers = -(-self.layers // pipeline)
        return replace(
            self,
            layers=layers,
            window_layers=-(-self.window_layers // pipeline),
            intermediate=-(-self.intermediate // tensor),
            heads=self.heads // tensor,
            kv_heads=max(1, self.kv_heads // tensor),
            vocab=-(-self.vocab // tensor),
            tensor=tensor,
            latent=None if self.latent is None else self.latent.shard(pipeline),
            experts=None if self.experts is None else self.experts.shard(tensor, layers),
            states=None if self.states is None else self.states.shard(tensor, pipeline),
        )

    @property
    def layer_weights(self) -> int:
        """Returns the weights of the linear layers of one decoder layer without experts."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.latent is not None:
            attention = self.latent.weights(self.hidden, self.heads)
        return attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.experts.layers

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of all linear layers, all experts and the output head, none of them quantised."""
        total = self.layers * self.layer_weights + self.hidden * self.vocab
        if self.experts is not None:
            per_size = self.mlp_matrices * self.hidden
            router = self.hidden * self.experts.count
            total += self.experts.layers * (per_size * (self.experts.weights - self.intermediate) + router)
        return total * self.dtype_bytes

    @property
    def mlp_activations(self) -> int:
        """Returns the elements of a row inside the MLP or inside its experts, whichever is more."""
        plain = self.mlp_matrices * self.intermediate
        if self.experts is None:
            return plain
        # an expert's output is one of several until they are added up
        one = self.mlp_matrices * self.experts.inner + self.hidden
        return max(plain, self.experts.chosen * one + self.mlp_matrices * self.experts.shared)

    @property
    def value_dim(self) -> int:
        """Returns the elements of a value that attention over the cache adds up."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def new_pair(self) -> int:
        """The elements of a key and a value of one head that new tokens are multiplied with among themselves."""
        if self.latent is None:
            return 2 * self.head_dim
        return self.latent.nope + self.latent.rotary + self.latent.value

    @property
    def kv_elements(self) -> int:
        """Returns the cached elements of one token in one layer."""
        return self.head_dim * (2 * self.kv_heads if self.latent is None else 1)

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of keys and values, and of keys of indexers, of one token in all layers of a block."""
        index = 0 if self.latent is None else self.latent.indexers * self.latent.index
        return (self.block_layers * self.kv_elements + index) * self.dtype_bytes

    @property
    def block_layers(self) -> int:
        """Layers of a block: all with attention, or a group's if some have windows
        (`_get_kv_cache_groups_uniform_page_size`).
        """
        if self.states is not None:
            return self.states.attending
        fewest, most = sorted((self.window_layers, self.layers - self.window_layers))
        if not fewest:
            return most
        return most if most < 1.5 * fewest else fewest


# Sizes of Meta's Llama 3.1 8B, the model of plans that do not name one.
LLAMA_8B = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256)


def _latent(config: Mapping[str, Any]) -> LatentSpec:
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rotary, nope, value = (_positive(name, config.get(name)) for name in names)
    found = LatentSpec(rank, rotary, nope, value, _optional(config, "q_lora_rank", 0))
    if not config.get("index_topk"):
        return found
    chosen, index = (_positive(name, config.get(name)) for name in ("index_topk", "index_head_dim"))
    return replace(found, chosen=chosen, indexers=_indexers(config), index=index)


def _indexers(config: Mapping[str, Any]) -> int:
    """Counts the layers with an indexer; others take the choices of an earlier layer (GLM-5)."""
    pattern, kinds = config.get("index_topk_pattern"), config.get("indexer_types")
    if pattern is not None or kinds is not None:
        return sum(kind not in ("S", "shared") for kind in pattern or kinds or ())
    frequency, skipped = _optional(config, "index_topk_freq", 1), _optional(config, "index_skip_topk_offset", 2)
    layers = _size(config, "num_hidden_layers")
    return sum(max(layer - skipped + 1, 0) % frequency == 0 for layer in range(layers))


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    for alias in ALIASES[name]:
        if (value := config.get(alias)) is not None:
            each = value if isinstance(value, list) and value else [value]  # Gemma 3n has one for each layer
            return round(sum(_positive(alias, one) for one in each) / len(each))
    if default is None:
        raise ValueError(f"model config: no {name}; expected the config.json of a decoder model")
    return default


_WINDOW_TYPES = ("sliding_attention", "chunked_attention")


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(layers with a window, its tokens)."""
    name = "sliding_window" if config.get("sliding_window") else "attention_chunk_size"
    window = config.get(name)
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    types = config.get("layer_types")
    if types is not None:
        count = sum(kind in _WINDOW_TYPES for kind in types)
    elif config.get("model_type") == "llama4_text":
        # layers with rotary positions have chunks, by default three of four
        count = sum(map(bool, config.get("no_rope_layers") or [(layer + 1) % 4 for layer in range(layers)]))
    else:
        count = layers
    return (min(count, layers), _positive(name, window)) if count else (0, 0)


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
