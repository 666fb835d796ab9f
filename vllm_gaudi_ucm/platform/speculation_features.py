"""Features that speculative decoding refuses: options of `--speculative-config`, and draft models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.transfer_config import has_connector
from vllm_gaudi_ucm.platform.feature import Feature, unless, where
from vllm_gaudi_ucm.vllm_api.platforms import HEAD_METHODS

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


def _is_in_checkpoint(config: SpeculativeConfig) -> bool:
    """Returns whether drafts come from a layer of the model's checkpoint, whose weights have the model's format."""
    draft, target = config.draft_model_config, config.target_model_config
    return config.method == "mtp" and draft.model == target.model and config.quantization in (None, target.quantization)


def _option(name: str, supported: object, why: str) -> Feature[SpeculativeConfig]:
    """An option of `--speculative-config` with one supported value. A supported vLLM may lack it."""

    def found(config: SpeculativeConfig) -> str | None:
        value = getattr(config, name, supported)
        return None if value == supported else repr(value)

    return Feature(f"the speculative option {name}={{found}}", "--speculative-config", why, found)


OF_SPECULATION: tuple[Feature[SpeculativeConfig], ...] = (
    Feature(
        "suffix decoding (the speculative method suffix)",
        "--speculative-config",
        "its package, arctic-inference, is also a plugin that replaces parts of vLLM, and builds kernels for CUDA; "
        "take the method `ngram`",
        lambda c: c.method == "suffix",
    ),
    Feature(
        "the speculative method {found}",
        "--speculative-config",
        "`ngram`, `draft_model`, `eagle`, `eagle3` and `mtp` are supported",
        lambda c: unless(str(c.method), ("ngram", "draft_model", "suffix", *HEAD_METHODS)),
    ),
    _option("rejection_sample_method", "standard", "outputs must have the model's own distribution"),
    Feature(
        "random drafts (draft_sample_method='probabilistic') of n-grams",
        "--speculative-config",
        "n-grams have no probabilities; take draft_sample_method='greedy', which is as exact",
        lambda c: c.method == "ngram" and c.draft_sample_method != "greedy",
    ),
    _option("parallel_drafting", False, "each draft is computed from the one before"),
    _option("enable_adaptive_verification", False, "the number of drafts is part of a bucket"),
    _option("use_heterogeneous_vocab", False, "a draft is a token id of the model"),
    _option("disable_padded_drafter_batch", False, "buckets pad a draft model's batch, too"),
    _option("kv_cache_dtype", None, "a draft model's KV cache is like the model's"),
    Feature(
        "the speculative option quantization={found}",
        "--speculative-config",
        "operations take float32, float16 and bfloat16",
        lambda c: None if c.quantization is None or _is_in_checkpoint(c) else repr(c.quantization),
    ),
    _option("moe_backend", None, "the plugin chooses the kernels of experts"),
    _option("attention_backend", None, "a draft model has the plugin's attention, too"),
    _option("draft_lm_head_quantization", None, "drafts come from `ngram` or from a model with a head of its own"),
    _option("xpress_topc", None, "drafts come from `ngram` or from a model that scores its whole vocabulary"),
    Feature(
        "custom logits processors with speculative decoding",
        "--logits-processors",
        "vLLM has none with drafts",
        lambda c: c.target_model_config is not None and bool(c.target_model_config.logits_processors),
    ),
)


def _other_vocabulary(config: SpeculativeConfig) -> str | None:
    draft, target = config.draft_model_config.get_vocab_size(), config.target_model_config.get_vocab_size()
    return None if draft == target else f"{draft} tokens, the model has {target}"


def _other_size(config: SpeculativeConfig) -> int | None:
    """Returns a different size of tensor parallelism; vLLM allows 1 with a model of several ranks."""
    draft, target = config.draft_parallel_config, config.target_parallel_config
    return None if draft.tensor_parallel_size == target.tensor_parallel_size else draft.tensor_parallel_size


def _other_attention(config: SpeculativeConfig) -> bool:
    return bool(config.draft_model_config.use_mla != config.target_model_config.use_mla)


HEADS = (
    "EagleLlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "DeepSeekMTPModel",
    "DeepseekV32MTPModel",
    "Glm4MoeMTPModel",
    "Qwen3NextMTP",
    "Qwen3_5MTP",
    "Qwen3_5MoeMTP",
)
"""Architectures of draft heads that are served."""


OF_DRAFT_HEAD: tuple[Feature[SpeculativeConfig], ...] = (
    Feature(
        "the draft head {found}",
        "--speculative-config",
        "heads for Llama (EAGLE, EAGLE-3) and of DeepSeek V3 and V3.2, GLM-4.5, GLM-5, Qwen3-Next and Qwen3.5 (MTP) "
        "are supported; take the method `ngram`",
        lambda c: unless(c.draft_model_config.architecture, HEADS),
    ),
    _option("disable_eagle_block_drop", False, "a block's last keys depend on the token behind it"),
    Feature(
        "the speculative option index_share_for_mtp_iteration=True",
        "--speculative-config",
        "each pass of a head chooses its own tokens; leave the option out",
        lambda c: c.index_share_for_mtp_iteration is True,
    ),
    _option("use_local_argmax_reduction", False, "logits are gathered, as the model's are"),
)
"""A head is also a draft model."""


def _with_a_head(config: VllmConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.method in HEAD_METHODS


OF_HEAD_IN_ENGINE: tuple[Feature[VllmConfig], ...] = (
    Feature(
        "a draft head with a KV connector",
        "--speculative-config",
        "the last keys of a stored block depend on the token behind it; take the method `ngram` or `draft_model`",
        where(_with_a_head, has_connector),
    ),
    Feature(
        "a draft head with adapters (LoRA)",
        "--enable-lora",
        "it has not been tried; merge the adapter into the weights, or take the method `ngram`",
        where(_with_a_head, lambda c: c.lora_config is not None),
    ),
)


OF_DRAFT_MODEL: tuple[Feature[SpeculativeConfig], ...] = (
    Feature(
        "a draft model of another vocabulary ({found})",
        "--speculative-config",
        "a draft is a token id of the model",
        _other_vocabulary,
    ),
    Feature(
        "a draft model with quantised weights ({found})",
        "--speculative-config",
        "vLLM gives a draft model the configuration of the model's weights; take it in bfloat16",
        lambda c: None if _is_in_checkpoint(c) else c.draft_model_config.quantization,
    ),
    Feature(
        "a draft model with tensor parallelism of its own",
        "--speculative-config draft_tensor_parallel_size={found}",
        "its layers are shared out like the model's",
        _other_size,
    ),
    Feature(
        "a draft model of another kind of attention (multi-head latent attention with keys and values of each head)",
        "--speculative-config",
        "blocks of both are one size; take a draft model of the same kind, or `ngram`",
        _other_attention,
    ),
)
