"""What an engine refuses when it starts, as one table (`REFUSED`): no flag is accepted and ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from vllm_gaudi_ucm.connector.transfer_config import configured_connectors
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig


ConfigT = TypeVar("ConfigT")


class Asked(NamedTuple):
    """A feature, and the flag or model that asks for it."""

    feature: str
    asked_by: str


class Feature(NamedTuple, Generic[ConfigT]):
    """A row of the table.

    Args:
        name: of the feature; `{found}` is the value that asks for it.
        asked_by: the flag, or `{model}`; `{found}` as in `name`.
        why: the reason, and what to do instead where there is something; for docs.
        found: the value in a configuration that asks for the feature; false where it does not ask.
    """

    name: str
    asked_by: str
    why: str
    found: Callable[[ConfigT], object]

    def asked(self, config: ConfigT, model: str = "") -> Asked | None:
        """The feature and who asks for it, as the error names them; None where the configuration does not."""
        found = self.found(config)
        if not found:
            return None
        return Asked(self.name.format(found=found), self.asked_by.format(found=found, model=f"model {model}"))


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


_ONE_DEVICE = "a worker drives one device, and an engine has one worker"


def _unless(found: str, supported: Sequence[str]) -> str | None:
    return None if found in supported else found


def _one_tensor_connector(config: VllmConfig) -> str | None:
    connectors = configured_connectors(config.kv_transfer_config)
    names = dict.fromkeys(connector.name for connector in connectors if connector.needs_one_tensor)
    return ", ".join(filter(None, names)) or None


def _one_tensor_backend(config: VllmConfig) -> str | None:
    if config.cache_config.kv_offloading_size is None:
        return None
    return _unless(config.cache_config.kv_offloading_backend, ("native",))


def _replaced_connector(config: VllmConfig) -> str | None:
    """The connector that vLLM would silently replace by its offloading connector."""
    if config.cache_config.kv_offloading_size is None or config.kv_transfer_config is None:
        return None
    name = config.kv_transfer_config.kv_connector
    return None if name == "OffloadingConnector" else name


def _parallel(name: str, why: str) -> Feature[VllmConfig]:
    """A size of `ParallelConfig`, which its flag is named after."""
    field = f"{name.replace(' ', '_')}_parallel_size"
    size = attrgetter(f"parallel_config.{field}")
    flag = f"--{field.replace('_', '-')} {{found}}"
    return Feature(f"{name} parallelism", flag, why, lambda c: _above_one(size(c)))


OF_ENGINE: tuple[Feature[VllmConfig], ...] = (
    _parallel("tensor", _ONE_DEVICE),
    _parallel("pipeline", _ONE_DEVICE),
    _parallel("data", "engines do not wait for each other's steps; start several servers"),
    _parallel("decode context", _ONE_DEVICE),
    _parallel("prefill context", _ONE_DEVICE),
    Feature("dual batch overlap", "--enable-dbo", "a step is one batch", lambda c: c.parallel_config.enable_dbo),
    Feature(
        "expert-parallel load balancing",
        "--enable-eplb",
        "there are no experts",
        lambda c: c.parallel_config.enable_eplb,
    ),
    Feature(
        "LoRA",
        "--enable-lora",
        "a step has no adapter index; merge the adapter into the model's weights",
        lambda c: c.lora_config,
    ),
    Feature(
        "encoder-cache connectors", "--ec-transfer-config", "there are no encoders", lambda c: c.ec_transfer_config
    ),
    Feature("watermarking", "--watermark-config", "our samplers do not apply it", lambda c: c.watermark_config),
    Feature(
        "diffusion models",
        "--diffusion-config",
        "a step computes one token after another",
        lambda c: c.diffusion_config,
    ),
    Feature(
        "profiling",
        "--profiler-config",
        "read the phase log (`ucm.phase_log`), which has the milliseconds of every step",
        lambda c: c.profiler_config.profiler is not None,
    ),
    Feature(
        "weight offloading",
        "--cpu-offload-gb",
        "weights are packed, and stay on the device",
        lambda c: c.offload_config.uva.cpu_offload_gb > 0,
    ),
    Feature(
        "the KV connector {found}, which takes keys and values of a layer for one tensor",
        "--kv-transfer-config",
        "they are two; take `OffloadingConnector`, ours, or one that takes pairs",
        _one_tensor_connector,
    ),
    Feature(
        "the KV offloading backend {found}, whose connector takes keys and values of a layer for one tensor",
        "--kv-offloading-backend {found}",
        "they are two; take the backend `native`",
        _one_tensor_backend,
    ),
    Feature(
        "the connector of --kv-offloading-size beside {found} (make it a child of MultiConnector)",
        "--kv-offloading-size",
        "vLLM would silently replace the other connector",
        _replaced_connector,
    ),
    Feature(
        "a KV cache of dtype {found}",
        "--kv-cache-dtype {found}",
        "attention reads float32, float16 and bfloat16",
        lambda c: _unless(c.cache_config.cache_dtype, ("auto", "float16", "bfloat16")),
    ),
)

_TOKENS_ONLY = "drafts must be a function of the tokens alone"


def _option(name: str, supported: object, why: str) -> Feature[SpeculativeConfig]:
    """An option of `--speculative-config` with one supported value."""
    value = attrgetter(name)
    return Feature(
        f"the speculative option {name}={{found}}",
        "--speculative-config",
        why,
        lambda c: None if value(c) == supported else repr(value(c)),
    )


OF_SPECULATION: tuple[Feature[SpeculativeConfig], ...] = (
    Feature(
        "the speculative method {found}",
        "--speculative-config",
        f"{_TOKENS_ONLY}: `ngram` and `draft_model` are supported",
        lambda c: _unless(str(c.method), ("ngram", "draft_model")),
    ),
    _option("rejection_sample_method", "standard", _TOKENS_ONLY),
    _option("draft_sample_method", "greedy", _TOKENS_ONLY),
    _option("parallel_drafting", False, _TOKENS_ONLY),
    _option("enable_adaptive_verification", False, "the number of drafts is part of a bucket"),
    _option("use_heterogeneous_vocab", False, "a draft is a token id of the model"),
    _option("disable_padded_drafter_batch", False, "buckets pad a draft model's batch, too"),
    _option("kv_cache_dtype", None, "a draft model's KV cache is like the model's"),
    _option("quantization", None, "operations take float32, float16 and bfloat16"),
    _option("moe_backend", None, "there are no experts"),
    _option("attention_backend", None, "a draft model has the plugin's attention, too"),
    Feature(
        "custom logits processors beside speculative decoding",
        "--logits-processors",
        "vLLM has none beside drafts",
        lambda c: c.target_model_config is not None and bool(c.target_model_config.logits_processors),
    ),
)


def _other_vocabulary(config: SpeculativeConfig) -> str | None:
    draft, target = config.draft_model_config.get_vocab_size(), config.target_model_config.get_vocab_size()
    return None if draft == target else f"{draft} tokens, the model has {target}"


OF_DRAFT_MODEL: tuple[Feature[SpeculativeConfig], ...] = (
    Feature(
        "a draft model of another vocabulary ({found})",
        "--speculative-config",
        "a draft is a token id of the model",
        _other_vocabulary,
    ),
    Feature(
        "tensor parallelism of a draft model",
        "--speculative-config",
        _ONE_DEVICE,
        lambda c: c.draft_parallel_config.tensor_parallel_size > 1,
    ),
)


_WHOLE_CONTEXT = "a token attends to its whole context, or to blocks that a sparse method chose"


def _has_sliding_window(config: ModelConfig) -> bool:
    """Qwen2-like configurations carry a window and a switch that turns it off."""
    return config.get_sliding_window() is not None and getattr(config.hf_text_config, "use_sliding_window", True)


OF_MODEL: tuple[Feature[ModelConfig], ...] = (
    Feature("encoder-decoder models", "{model}", "attention is causal", lambda c: c.is_encoder_decoder),
    Feature("multimodal models", "{model}", "a prompt is token ids alone", lambda c: c.is_multimodal_model),
    Feature(
        "pooling models",
        "{model} or --runner",
        "a step computes tokens",
        lambda c: c.runner_type not in ("generate", "draft"),
    ),
    Feature(
        "multi-head latent attention (MLA)",
        "{model}",
        "the KV cache has keys and values for each head",
        lambda c: c.use_mla,
    ),
    Feature(
        "attention-free models", "{model}", "a state that is no KV block is not kept", lambda c: c.is_attention_free
    ),
    Feature(
        "models with recurrent state (Mamba, linear attention)",
        "{model}",
        "a state that is no KV block is not kept",
        lambda c: c.is_hybrid or c.has_inner_state,
    ),
    Feature("sliding-window attention", "{model}", _WHOLE_CONTEXT, _has_sliding_window),
    Feature("chunked local attention", "{model}", _WHOLE_CONTEXT, lambda c: c.attention_chunk_size is not None),
    Feature(
        "mixture-of-experts models ({found} experts)",
        "{model}",
        "shapes of a step would depend on which experts its tokens take",
        lambda c: _above_one(most_experts(c.hf_text_config)),
    ),
    Feature("rotary positions with several axes (M-RoPE)", "{model}", "a row has one position", lambda c: c.uses_mrope),
    Feature(
        "prompt embeddings", "--enable-prompt-embeds", "a prompt is token ids alone", lambda c: c.enable_prompt_embeds
    ),
    Feature(
        "quantised weights ({found})",
        "{model} or --quantization",
        "operations take float32, float16 and bfloat16",
        lambda c: c.quantization,
    ),
    Feature(
        "sampling masks", "--return-sampling-mask", "our samplers do not return them", lambda c: c.return_sampling_mask
    ),
    Feature(
        "trace replay", "--enable-trace-replay", "our samplers do not replay tokens", lambda c: c.enable_trace_replay
    ),
)


def _connector(config: VllmConfig) -> str | None:
    # vLLM sets the connector of --kv-offloading-size later
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector:
        return config.kv_transfer_config.kv_connector
    return "OffloadingConnector" if config.cache_config.kv_offloading_size is not None else None


_TOKENS = "with ucm.kv_cache.granularity 'token'"

OF_TOKENS: tuple[Feature[VllmConfig], ...] = (
    Feature(
        f"the KV connector {{found}} {_TOKENS}",
        "--kv-transfer-config or --kv-offloading-size",
        "stores keep blocks",
        _connector,
    ),
    Feature(
        f"a number of blocks {_TOKENS}",
        "--num-gpu-blocks-override {found}",
        "there are no blocks; `ucm.kv_cache.max_total_token_num` counts slots",
        lambda c: c.cache_config.num_gpu_blocks_override,
    ),
)

REFUSED: tuple[Feature[Any], ...] = (*OF_ENGINE, *OF_MODEL, *OF_SPECULATION, *OF_DRAFT_MODEL, *OF_TOKENS)
"""The table in docs/support.md; a test compares them."""


def refuse_unsupported(vllm_config: VllmConfig, *, by_token: bool = False) -> None:
    """Raises one UnsupportedFeatureError that names every unsupported feature that the configuration asks for.

    by_token: each token has a slot of its own in the KV cache.
    """
    asked = list(_asked(OF_ENGINE, vllm_config))
    if by_token:
        asked += _asked(OF_TOKENS, vllm_config)
    if vllm_config.speculative_config is not None:
        asked += _asked_by_speculation(vllm_config.speculative_config)
    if vllm_config.model_config is not None:
        asked += _asked_by_model(vllm_config.model_config)
    if asked:
        features, sources = zip(*asked, strict=True)
        raise UnsupportedFeatureError(", ".join(features), ", ".join(dict.fromkeys(sources)))


def _asked(table: Sequence[Feature[ConfigT]], config: ConfigT, model: str = "") -> Iterator[Asked]:
    for feature in table:
        asked = feature.asked(config, model)
        if asked is not None:
            yield asked


def _asked_by_model(config: ModelConfig) -> Iterator[Asked]:
    return _asked(OF_MODEL, config, config.model)


def _asked_by_speculation(config: SpeculativeConfig) -> Iterator[Asked]:
    """Drafts must be a function of the tokens alone (see speculation/verification.py)."""
    yield from _asked(OF_SPECULATION, config)
    if config.method == "draft_model":
        yield from _asked(OF_DRAFT_MODEL, config)
        for feature, _ in _asked_by_model(config.draft_model_config):
            yield Asked(f"{feature} of a draft model", "--speculative-config")


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_routed_experts", "n_routed_experts")


def most_experts(config: PretrainedConfig) -> int:
    """Experts of the layer that has the most, 0 where a model has none.

    vLLM's `ModelConfig.get_num_experts` takes the first of four keys that it finds, on the top level. What counts
    experts of a draft head (`mtp_...`) says nothing of the layers that are served.
    """
    return max((count for count in _expert_counts(config.to_dict())), default=0)


def _expert_counts(value: Any) -> Iterator[int]:
    """The numbers under keys that count experts, at any depth: models keep them in sections and lists of layers."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _expert_counts(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if str(key).endswith(_EXPERT_COUNTS) and not str(key).startswith("mtp_"):
                yield from (item for item in (inner if isinstance(inner, list) else [inner]) if type(item) is int)
            yield from _expert_counts(inner)
