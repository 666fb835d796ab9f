"""Refuses unsupported features when an engine starts, by one table (`REFUSED`): no flag is accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.config.exclusions import OF_ENGINE as EXCLUDED
from vllm_gaudi_ucm.config.exclusions import Option
from vllm_gaudi_ucm.connector.transfer_config import configured_connectors
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.embedding_features import OF_PROMPT_EMBEDDINGS
from vllm_gaudi_ucm.platform.feature import Asked, ConfigT, Feature, unless
from vllm_gaudi_ucm.platform.lora_features import OF_LORA
from vllm_gaudi_ucm.platform.picture_features import OF_PICTURES
from vllm_gaudi_ucm.platform.pooling_features import OF_POOLING, OPTIONS_OF_POOLING
from vllm_gaudi_ucm.platform.quantised_weights import OF_WEIGHTS, measured_ranges
from vllm_gaudi_ucm.platform.speculation_features import (
    OF_DRAFT_HEAD,
    OF_DRAFT_MODEL,
    OF_HEAD_IN_ENGINE,
    OF_SPECULATION,
)
from vllm_gaudi_ucm.platform.state_features import OF_STATES
from vllm_gaudi_ucm.vllm_api.cache_options import FLOAT_KV_DTYPES
from vllm_gaudi_ucm.vllm_api.platforms import HEAD_METHODS, computes_drafts

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


_KV_DTYPES = ("auto", "float16", "bfloat16", *FLOAT_KV_DTYPES, "fp8", "fp8_e4m3")
_ONE_DEVICE = "a request's context is on the devices of one group"


def _one_tensor_connector(config: VllmConfig) -> str | None:
    found = [one for one in configured_connectors(config.kv_transfer_config) if one.needs_one_tensor]
    outside = " (it does not declare takes_kv_pairs = True)"
    names = dict.fromkeys(f"{one.name}{'' if one.module is None else outside}" for one in found)
    return ", ".join(names) or None


def _one_tensor_backend(config: VllmConfig) -> str | None:
    if config.cache_config.kv_offloading_size is None:
        return None
    return unless(config.cache_config.kv_offloading_backend, ("native",))


def _replaced_connector(config: VllmConfig) -> str | None:
    """The connector that vLLM would silently replace by its offloading connector."""
    if config.cache_config.kv_offloading_size is None or config.kv_transfer_config is None:
        return None
    name = config.kv_transfer_config.kv_connector
    return None if name == "OffloadingConnector" else name


def _profiler_option(config: VllmConfig) -> str | None:
    options = ("capture_torch_profiler", "detailed_trace_annotation")
    return ", ".join(name for name in options if getattr(config.profiler_config, name)) or None


def _parallel(name: str, why: str) -> Feature[VllmConfig]:
    """A size of `ParallelConfig`, which its flag is named after."""
    field = f"{name.replace(' ', '_')}_parallel_size"
    size = attrgetter(f"parallel_config.{field}")
    flag = f"--{field.replace('_', '-')} {{found}}"
    return Feature(f"{name} parallelism", flag, why, lambda c: _above_one(size(c)))


def _foreign_processors(config: VllmConfig) -> bool:
    """Returns whether vLLM's frontend would refuse logits processors that our sampler calls."""
    from vllm_gaudi_ucm.vllm_api.sampling import is_for_any_runner

    custom = None if config.model_config is None else config.model_config.logits_processors
    return bool(custom) and config.use_v2_model_runner and not all(map(is_for_any_runner, custom or ()))


def _has_experts(config: VllmConfig) -> bool:
    model = config.model_config
    return model is not None and most_experts(model.hf_text_config) > 1


def _engines_of_experts(config: VllmConfig) -> int | None:
    """Returns how many engines share out the model's experts."""
    return _above_one(config.parallel_config.data_parallel_size) if _has_experts(config) else None


def _readers_in_stages(config: VllmConfig) -> int | None:
    """Returns how many layers read the keys and values of earlier layers, if there are several pipeline stages."""
    several = config.parallel_config.pipeline_parallel_size > 1 and config.model_config is not None
    return getattr(config.model_config.hf_text_config, "num_kv_shared_layers", None) or None if several else None


OF_ENGINE: tuple[Feature[VllmConfig], ...] = (
    _parallel("decode context", _ONE_DEVICE),
    _parallel("prefill context", _ONE_DEVICE),
    Feature(
        "speculative decoding with pipeline parallelism, for which vLLM schedules drafts of a request before it has "
        "the token that they follow (take --tensor-parallel-size)",
        "--speculative-config",
        "with several batches in flight its scheduler gets a step's drafts before the step's tokens, and puts them in "
        "the places of these",
        lambda c: c.speculative_config is not None and c.parallel_config.pipeline_parallel_size > 1,
    ),
    Feature("dual batch overlap", "--enable-dbo", "a step is one batch", lambda c: c.parallel_config.enable_dbo),
    Feature(
        "expert-parallel load balancing",
        "--enable-eplb",
        "an expert stays where it was loaded",
        lambda c: c.parallel_config.enable_eplb,
    ),
    Feature(
        "pipeline stages with {found} engines that share out experts (take --tensor-parallel-size)",
        "--pipeline-parallel-size",
        "batches in flight would have to be in step in all engines",
        lambda c: _engines_of_experts(c) if c.parallel_config.pipeline_parallel_size > 1 else None,
    ),
    Feature(
        "pipeline stages with a model whose last {found} layers read keys and values of earlier ones",
        "--pipeline-parallel-size",
        "these would be in another stage; take --tensor-parallel-size",
        _readers_in_stages,
    ),
    Feature(
        "whole experts on each device with {found} engines of several devices (leave the flag out, or take "
        "--tensor-parallel-size 1)",
        "--enable-expert-parallel",
        "vLLM's models would share out rows inside of an engine as well",
        lambda c: _engines_of_experts(c) if c.parallel_config.use_sequence_parallel_moe else None,
    ),
    Feature(
        "drafts with {found} engines that share out experts",
        "--speculative-config",
        "a verification reads rows of a step after engines went on to the next one",
        lambda c: _engines_of_experts(c) if c.speculative_config is not None else None,
    ),
    Feature(
        "another exchange of experts' rows than gathering and adding up ({found})",
        "--all2all-backend {found}",
        "rows of all engines are gathered, and results added up",
        lambda c: (
            unless(c.parallel_config.all2all_backend, ("allgather_reducescatter",)) if _engines_of_experts(c) else None
        ),
    ),
    Feature(
        "the kernels {found} of experts",
        "--moe-backend {found}",
        "they are of vLLM's other platforms; the plugin chooses its own",
        lambda c: unless(c.kernel_config.moe_backend, ("auto",)),
    ),
    Feature(
        "a kernel for whole layers",
        "--monokernel",
        "only vLLM's other platforms have it; leave the flag out",
        # of vLLM 0.33
        lambda c: getattr(c.kernel_config, "monokernel", False),
    ),
    Feature(
        "the chosen experts in outputs",
        "--enable-return-routed-experts",
        "a step does not keep them",
        lambda c: c.aux_output_config.enable_return_routed_experts,
    ),
    Feature(
        "encoder-cache connectors",
        "--ec-transfer-config",
        "a worker encodes the pictures of its own steps; leave the flag out",
        lambda c: c.ec_transfer_config,
    ),
    Feature("watermarking", "--watermark-config", "our samplers do not apply it", lambda c: c.watermark_config),
    Feature(
        "diffusion models",
        "--diffusion-config",
        "a step computes one token after another",
        lambda c: c.diffusion_config,
    ),
    Feature(
        "the profiler {found}",
        "--profiler-config",
        "it follows Triton's kernels alone, and the plugin captures its own graphs; take `torch`",
        lambda c: unless(c.profiler_config.profiler or "torch", ("torch", "cuda")),
    ),
    Feature(
        "the profiler's option {found}",
        "--profiler-config",
        "it is for graphs and names of vLLM's own; leave it out, a trace has the sizes of each step",
        _profiler_option,
    ),
    Feature(
        "weight offloading",
        "--cpu-offload-gb",
        "graphs have the addresses of weights on the device; take quantised weights or more devices",
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
        "the connector of --kv-offloading-size with {found} (make it a child of MultiConnector)",
        "--kv-offloading-size",
        "vLLM would silently replace the other connector",
        _replaced_connector,
    ),
    Feature(
        "custom logits processors for vLLM's V2 runner (set VLLM_USE_V2_MODEL_RUNNER=0)",
        "--logits-processors",
        "our sampler calls those of the V1 runner, and the plugin asks for that one unless the variable is set",
        _foreign_processors,
    ),
    Feature(
        "sleep mode by {found}",
        "--sleep-mode-backend {found}",
        "the plugin gives back memory in its own way; leave the flag out",
        lambda c: None if c.model_config is None else unless(c.model_config.sleep_mode_backend, ("cumem",)),
    ),
    Feature(
        "measured ranges without `--quantization inc`",
        "QUANT_CONFIG",
        "add that flag for a checkpoint with plain weights, or unset the variable",
        lambda c: None if c.model_config is None else measured_ranges(c.model_config),
    ),
    Feature(
        "a KV cache of dtype {found}",
        "--kv-cache-dtype {found}",
        "attention reads float32, float16, bfloat16 and 8-bit floats with scales per tensor or head; take `fp8`",
        lambda c: unless(c.cache_config.cache_dtype, _KV_DTYPES),
    ),
)


_ALL_OR_NONE = ("qwen2", "qwen3")


def _windows_by_layer(config: ModelConfig) -> str | None:
    """The value if `max_window_layers` gives only some layers a window: vLLM's class then fails with an assertion."""
    text = config.hf_text_config
    family = str(getattr(text, "model_type", ""))
    if config.get_sliding_window() is None or not getattr(text, "use_sliding_window", True):
        return None
    mixed = len(set(getattr(text, "layer_types", None) or ())) > 1
    return family if mixed and family.startswith(_ALL_OR_NONE) else None


def _end_of_positions(config: ModelConfig) -> int | None:
    """Returns the end of a table of learned positions that `--max-model-len` exceeds. Other positions are computed, and
    `refuse_far_positions` checks their tables.
    """
    text = config.hf_text_config
    slopes = getattr(text, "position_embedding_type", None) == "alibi"
    ends = getattr(text, "max_position_embeddings", None)
    if slopes or ends is None or getattr(text, "rope_parameters", None):
        return None
    return ends if config.max_model_len > ends else None


OF_MODEL: tuple[Feature[ModelConfig], ...] = (
    Feature("encoder-decoder models", "{model}", "attention is causal", lambda c: c.is_encoder_decoder),
    Feature("attention-free models", "{model}", "a step needs a layer with attention", lambda c: c.is_attention_free),
    Feature(
        "models with recurrent state that vLLM does not list as hybrids",
        "{model}",
        "a state is kept for Mamba-2, gated delta nets and short convolutions between layers with attention",
        lambda c: c.has_inner_state and not c.is_hybrid,
    ),
    Feature(
        "sliding-window attention in some layers of a {found}",
        "{model}",
        "vLLM implements this family with windows in all layers or in none",
        _windows_by_layer,
    ),
    Feature(
        "positions beyond the model's {found}",
        "--max-model-len",
        "it has learned a vector for each position; take at most as many tokens",
        _end_of_positions,
    ),
    Feature(
        "rotary positions with {found} axes (XD-RoPE)",
        "{model}",
        "a row has at most three positions",
        lambda c: c.mrope_num_dims if c.mrope_num_dims > 3 else None,
    ),
    *OF_WEIGHTS,
    Feature(
        "sampling masks", "--return-sampling-mask", "our samplers do not return them", lambda c: c.return_sampling_mask
    ),
    Feature(
        "trace replay", "--enable-trace-replay", "our samplers do not replay tokens", lambda c: c.enable_trace_replay
    ),
)


OF_POLICIES: tuple[tuple[Option, Feature[VllmConfig]], ...] = tuple(
    (row.policy, Feature(row.name, row.asked_by, row.why, row.found)) for row in EXCLUDED
)
"""A policy of the KV cache's blocks, and what it excludes."""

REFUSED: tuple[Feature[Any], ...] = (
    *OF_ENGINE,
    *OF_POOLING,
    *(feature for _, feature in OPTIONS_OF_POOLING),
    *OF_LORA,
    *OF_PICTURES,
    *OF_PROMPT_EMBEDDINGS,
    *OF_STATES,
    *OF_MODEL,
    *OF_SPECULATION,
    *OF_DRAFT_HEAD,
    *OF_HEAD_IN_ENGINE,
    *OF_DRAFT_MODEL,
    *(feature for _, feature in OF_POLICIES),
)
"""The table in docs/support.md; a test compares them."""


def refuse_unsupported(vllm_config: VllmConfig, config: UcmConfig) -> None:
    """Raises one UnsupportedFeatureError that names every unsupported feature that the configuration asks for."""
    tables = (OF_ENGINE, OF_POOLING, OF_LORA, OF_PICTURES, OF_PROMPT_EMBEDDINGS, OF_STATES, OF_HEAD_IN_ENGINE)
    asked = [one for table in tables for one in _asked(table, vllm_config)]
    of_options = (*OF_POLICIES, *OPTIONS_OF_POOLING)
    asked += _asked([feature for option, feature in of_options if option.is_on(config)], vllm_config)
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
    if config.method in HEAD_METHODS:
        yield from _asked(OF_DRAFT_HEAD, config)
    if computes_drafts(config):
        yield from _asked(OF_DRAFT_MODEL, config)
        for feature, _ in _asked_by_model(config.draft_model_config):
            yield Asked(f"{feature} of a draft model", "--speculative-config")


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_routed_experts", "n_routed_experts")


def most_experts(config: PretrainedConfig) -> int:
    """Returns the experts of the layer that has the most; 0 for a model without experts.

    vLLM's `ModelConfig.get_num_experts` takes the first of four keys that it finds, on the top level. Keys for a draft
    head (`mtp_...`) tell nothing about the layers that are served.
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
