"""What this version does not support is refused when the engine starts, by name; nothing is accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, OURS, ConnectorOptions, configured_connectors
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.store.file import FileStoreOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises one error that names every unsupported feature that the configuration asks for."""
    asked = [*_asked_by_parallel(vllm_config.parallel_config), *_asked_by_engine(vllm_config)]
    if vllm_config.speculative_config is not None:
        asked += [*_asked_by_speculation(vllm_config.speculative_config)]
    if vllm_config.model_config is not None:
        asked += [*_asked_by_model(vllm_config.model_config)]
    if asked:
        features, sources = zip(*asked, strict=True)
        raise UnsupportedFeatureError(", ".join(features), ", ".join(dict.fromkeys(sources)))


Asked = tuple[str, str]


def _asked_by_parallel(config: ParallelConfig) -> Iterator[Asked]:
    sizes = {
        "tensor parallelism": ("--tensor-parallel-size", config.tensor_parallel_size),
        "pipeline parallelism": ("--pipeline-parallel-size", config.pipeline_parallel_size),
        "data parallelism": ("--data-parallel-size", config.data_parallel_size),
        "decode context parallelism": ("--decode-context-parallel-size", config.decode_context_parallel_size),
        "prefill context parallelism": ("--prefill-context-parallel-size", config.prefill_context_parallel_size),
    }
    for feature, (flag, size) in sizes.items():
        if size > 1:
            yield feature, f"{flag} {size}"
    if config.enable_dbo:
        yield "dual batch overlap", "--enable-dbo"
    if config.enable_eplb:
        yield "expert-parallel load balancing", "--enable-eplb"


def _asked_by_engine(config: VllmConfig) -> Iterator[Asked]:
    flags = {
        "LoRA": ("--enable-lora", config.lora_config is not None),
        "encoder-cache connectors": ("--ec-transfer-config", config.ec_transfer_config is not None),
        "watermarking": ("--watermark-config", config.watermark_config is not None),
        "diffusion models": ("--diffusion-config", config.diffusion_config is not None),
        "profiling": ("--profiler-config", config.profiler_config.profiler is not None),
        "weight offloading": ("--cpu-offload-gb", config.offload_config.uva.cpu_offload_gb > 0),
    }
    for feature, (flag, is_asked) in flags.items():
        if is_asked:
            yield feature, flag
    yield from _asked_by_transfer(config)
    dtype = config.cache_config.cache_dtype
    if dtype not in ("auto", "float16", "bfloat16"):
        yield f"a KV cache of dtype {dtype}", f"--kv-cache-dtype {dtype}"


def _asked_by_transfer(config: VllmConfig) -> Iterator[Asked]:
    transfer = config.kv_transfer_config
    for connector in configured_connectors(transfer):
        if connector.name in CUDA_CONNECTORS:
            yield f"the KV connector {connector.name}, which copies by CUDA kernels of vLLM", "--kv-transfer-config"
    name = None if transfer is None else transfer.kv_connector
    if config.cache_config.kv_offloading_size is not None and name not in (None, "OffloadingConnector"):
        # vLLM would put it in the place of the other without a word
        yield (
            f"the connector of --kv-offloading-size beside {name} (make it a child of MultiConnector)",
            "--kv-offloading-size",
        )


CUDA_CONNECTORS = ("SimpleCPUOffloadConnector", "HiSparseConnector")

SPECULATIVE_METHODS = ("ngram", "draft_model")


def _asked_by_speculation(config: SpeculativeConfig) -> Iterator[Asked]:
    """Drafts must be a function of the tokens alone (see speculation/verification.py)."""
    if config.method not in SPECULATIVE_METHODS:
        yield f"the speculative method {config.method}", "--speculative-config"
    options = {
        "rejection_sample_method": config.rejection_sample_method != "standard",
        "draft_sample_method": config.draft_sample_method != "greedy",
        "parallel_drafting": config.parallel_drafting,
        "enable_adaptive_verification": config.enable_adaptive_verification,
        "use_heterogeneous_vocab": config.use_heterogeneous_vocab,
        "disable_padded_drafter_batch": config.disable_padded_drafter_batch,
        "kv_cache_dtype": config.kv_cache_dtype is not None,
        "quantization": config.quantization is not None,
        "moe_backend": config.moe_backend is not None,
        "attention_backend": config.attention_backend is not None,
    }
    for name, is_asked in options.items():
        if is_asked:
            yield f"the speculative option {name}={getattr(config, name)!r}", "--speculative-config"
    target = config.target_model_config
    if target is not None and target.logits_processors:
        yield "custom logits processors beside speculative decoding", "--logits-processors"
    if config.method == "draft_model":
        yield from _asked_by_draft_model(config)


def _asked_by_draft_model(config: SpeculativeConfig) -> Iterator[Asked]:
    draft, target = config.draft_model_config, config.target_model_config
    if draft.get_vocab_size() != target.get_vocab_size():
        sizes = f"{draft.get_vocab_size()} tokens, the model has {target.get_vocab_size()}"
        yield f"a draft model of another vocabulary ({sizes})", "--speculative-config"
    if config.draft_parallel_config.tensor_parallel_size > 1:
        yield "tensor parallelism of a draft model", "--speculative-config"
    for feature, _ in _asked_by_model(draft):
        yield f"{feature} of a draft model", "--speculative-config"


def _asked_by_model(config: ModelConfig) -> Iterator[Asked]:
    name = f"model {config.model}"
    experts = most_experts(config.hf_text_config)
    traits = {
        "encoder-decoder models": (name, config.is_encoder_decoder),
        "multimodal models": (name, config.is_multimodal_model),
        "pooling models": (f"{name} or --runner", config.runner_type not in ("generate", "draft")),
        "multi-head latent attention (MLA)": (name, config.use_mla),
        "attention-free models": (name, config.is_attention_free),
        "models with recurrent state (Mamba, linear attention)": (name, config.is_hybrid or config.has_inner_state),
        "sliding-window attention": (name, _has_sliding_window(config)),
        "chunked local attention": (name, config.attention_chunk_size is not None),
        f"mixture-of-experts models ({experts} experts)": (name, experts > 1),
        "rotary positions with several axes (M-RoPE)": (name, config.uses_mrope),
        "prompt embeddings": ("--enable-prompt-embeds", config.enable_prompt_embeds),
        f"quantised weights ({config.quantization})": (f"{name} or --quantization", config.quantization is not None),
        "sampling masks": ("--return-sampling-mask", config.return_sampling_mask),
        "trace replay": ("--enable-trace-replay", config.enable_trace_replay),
    }
    for feature, (asked_by, is_asked) in traits.items():
        if is_asked:
            yield feature, asked_by


def _has_sliding_window(config: ModelConfig) -> bool:
    """Qwen2-like configurations carry a window together with a switch that turns it off."""
    return config.get_sliding_window() is not None and getattr(config.hf_text_config, "use_sliding_window", True)


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


_MODE = "with ucm.memory_mode"


def refuse_beside_memory_mode(vllm_config: VllmConfig, options: MemoryModeOptions) -> None:
    """Raises UnsupportedFeatureError for what reads block tables and does not know of blocks that are away: a KV
    connector that is not ours, and a draft model, whose layers share the tables.

    Raises UcmConfigError for copies in the folder of the connector, which either would fill up to its own capacity.
    """
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if transfer is not None:
        _check_connector(transfer, options)
    if speculation is not None and speculation.method == "draft_model":
        raise UnsupportedFeatureError(f"a draft model {_MODE}", "--speculative-config")


def _check_connector(transfer: KVTransferConfig, options: MemoryModeOptions) -> None:
    if transfer.kv_connector != OURS:
        # vLLM names that of the flag later
        asked_by = "--kv-transfer-config" if transfer.kv_connector else "--kv-offloading-size"
        name = transfer.kv_connector or "OffloadingConnector"
        raise UnsupportedFeatureError(f"the KV connector {name} {_MODE}", asked_by)
    store = ConnectorOptions.resolve(transfer.kv_connector_extra_config, EXTRA_CONFIG).store
    both = (store, options.store)
    paths = [one.path.resolve() for one in both if isinstance(one, FileStoreOptions)]
    if len(paths) == 2 and paths[0] == paths[1]:
        wanted = f"another folder than that of {EXTRA_CONFIG}.store"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", str(paths[1]), wanted)])
