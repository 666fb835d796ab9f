"""Fills gaps of `vllm.platforms`, the extension point of platform plugins.

Imports vLLM inside functions only: our platform class is loaded while vLLM is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

logger = plugin_logger(__name__)


def vllm_own_platforms() -> list[str]:
    """Names of vLLM's built-in platforms that would be active here (`cuda`, `cpu`, ...), usually none or one.

    Never touches `current_platform`, so that `register()` may call it while vLLM resolves that very attribute.

    Reason: vLLM has no call for the platform that it would take without this plugin. It calls its built-in plugins one
    by one, and so does this function.
    Remove when: `vllm.platforms` has a function for it.
    """
    from vllm.platforms import builtin_platform_plugins

    active = []
    for name, plugin in builtin_platform_plugins.items():
        try:
            if plugin() is not None:
                active.append(name)
        except Exception:
            # vLLM takes a built-in plugin that raises for inactive; deciding otherwise would disagree with it.
            logger.debug("vLLM's built-in platform %s failed during detection", name, exc_info=True)
    return active


def tolerate_missing_accelerator(device_type: str) -> None:
    """Makes `torch.accelerator`'s calls harmless in a process whose device has no allocator behind them.

    Reason: vLLM makes these calls on all platforms except its own CPU platform: when a model is loaded
    (`BaseModelLoader.load_model`) and when an engine ends (`cleanup_dist_env_and_memory`), which users call in their
    own process, too. On a CPU-only torch they raise; vLLM's own CPU worker replaces the same calls. On Gaudi those of
    the allocator raise "Allocator for hpu is not a DeviceAllocator", from Gaudi software 1.24.1 on: there is no cache
    to empty, and the bridge answers the other calls. A user's process calls this when it checks an engine's
    configuration, a worker before it loads the model; importing the plugin changes nothing, and no card is started.
    Remove when: both places ask `torch.accelerator.is_available()` first, and Gaudi's bridge has a DeviceAllocator.
    """
    import torch

    if device_type == "hpu":
        replaced = _ON_HPU
    elif torch.accelerator.is_available():
        return
    else:
        replaced = _WITHOUT_ACCELERATOR
    for name, function in replaced.items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, function)


def _nothing_to_do(*args: object, **kwargs: object) -> None:
    """There is no accelerator, or no cache that could be emptied."""


def _wait_for_hpu(device: object = None, /) -> None:
    """The bridge's own call; whether torch's reaches it is not known."""
    import torch

    torch.hpu.synchronize()  # type: ignore[attr-defined]  # the bridge adds it


def _hpu_memory(device_index: object = None, /) -> tuple[int, int]:
    """Free and total bytes of the bridge's pool."""
    import torch

    free, total = torch.hpu.mem_get_info()  # type: ignore[attr-defined]  # the bridge adds it
    return int(free), int(total)


_WITHOUT_ACCELERATOR: dict[str, Callable[..., object]] = dict.fromkeys(
    ("empty_cache", "empty_host_cache", "synchronize"), _nothing_to_do
)
# vLLM's measurements (`memory_stats`, `memory_reserved`, `reset_peak_memory_stats`) are left to raise: its GPU worker
# alone makes them, and there is no true answer.
_ON_HPU: dict[str, Callable[..., object]] = {
    "empty_cache": _nothing_to_do,
    "empty_host_cache": _nothing_to_do,
    "synchronize": _wait_for_hpu,
    "get_memory_info": _hpu_memory,
}


def client_error(message: str) -> Exception:
    """Returns an error that the server answers with status 400.

    Reason: vLLM distinguishes a client's mistakes from its own by a class of exceptions, which is internal, and answers
        500 to a ValueError.
    Remove when: `Platform.validate_request` may raise ValueError.
    """
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)


def uses_older_ray_executor(vllm_config: VllmConfig) -> bool:
    """True if workers on Ray are driven by the older of vLLM's two executors.

    Reason: that one calls the model runner of its own worker instead of the worker, and moves tensors by Ray's compiled
    graph, which supports only CUDA. Only an environment variable tells which of the two is used. vLLM 0.33 has neither
    that executor nor the variable.
    Remove when: the oldest supported vLLM is 0.33, which has only `RayExecutorV2`.
    """
    import vllm.envs

    is_newer = getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    return vllm_config.parallel_config.use_ray and not is_newer


def has_heads_of_several_sizes(model_config: ModelConfig | None) -> bool:
    """True if attention layers of the model differ in the size of their heads (Gemma 4).

    Reason: vLLM answers for one layer at a time.
    Remove when: `ModelConfig` has a property for it.
    """
    layers = None if model_config is None else model_config.model_arch_config.per_layer_overrides
    return len({layer.get("head_size") for layer in layers or ()}) > 1


def take_back_attention_backend(vllm_config: VllmConfig) -> bool:
    """Replaces the attention backend that vLLM has chosen for a model by ours; True if there was one.

    Reason: if heads differ in size, vLLM puts `TRITON_ATTN` into the configuration before it asks the platform
    (`Gemma4Config`), so that it looks like a flag.
    Remove when: that choice is left to platforms.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    is_triton = vllm_config.attention_config.backend is AttentionBackendEnum.TRITON_ATTN
    if not is_triton or not has_heads_of_several_sizes(vllm_config.model_config):
        return False
    vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
    return True


def reads_pictures(vllm_config: VllmConfig) -> bool:
    """Returns whether the engine takes pictures: its model has an encoder of them, and no flag excludes its inputs.

    Reason: a configuration may have no model, and vLLM asks the model's processor.
    Remove when: `VllmConfig` has a property for it.
    """
    model = vllm_config.model_config
    return model is not None and model.is_multimodal_model and bool(model.supports_multimodal_inputs)


def takes_media(vllm_config: VllmConfig, kind: str) -> bool:
    """Returns whether a model that reads pictures takes other media, too, as far as `--limit-mm-per-prompt` allows.

    kind: `video` or `audio`.

    Reason: vLLM's processors, not its configuration, say which media a model has.
    Remove when: `ModelConfig` has a property for it.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model = vllm_config.model_config
    media = MULTIMODAL_REGISTRY.get_processing_info(model).supported_mm_limits
    return kind in media and model.get_multimodal_config().get_limit_per_prompt(kind) > 0


def is_pooling(vllm_config: VllmConfig) -> bool:
    """Returns whether the engine's model pools its hidden states, instead of yielding tokens.

    Reason: a configuration may have no model, and vLLM compares `runner_type` wherever it asks.
    Remove when: `VllmConfig` has a property for it.
    """
    model = vllm_config.model_config
    return model is not None and model.runner_type == "pooling"


HEAD_METHODS = ("eagle", "eagle3", "mtp")
"""Speculative methods whose drafts come from hidden states of the model."""


def computes_drafts(config: SpeculativeConfig | None) -> bool:
    """Returns whether drafts come from layers of a model: a draft model, or a head of the model itself.

    Reason: vLLM's `draft_model_config` is also set for n-grams, to the model's own.
    Remove when: `SpeculativeConfig` has a property for it.
    """
    return config is not None and config.method in ("draft_model", *HEAD_METHODS)


def attends_both_ways(vllm_config: VllmConfig) -> bool:
    """Returns whether rows of the engine's model see the tokens behind them, too: it is an encoder, without a KV cache.

    Reason: `ModelConfig.attn_type` also tells of models that do not pool, and is missing without a model.
    Remove when: `VllmConfig` has a property for it.
    """
    return is_pooling(vllm_config) and vllm_config.model_config.attn_type == "encoder_only"


def keeps_states(vllm_config: VllmConfig) -> bool:
    """Returns whether layers of the engine's model keep a state, in addition to others with attention.

    Reason: a configuration may have no model.
    Remove when: `VllmConfig` has a property for it.
    """
    model = vllm_config.model_config
    return model is not None and model.is_hybrid


def place_states_outside_blocks(vllm_config: VllmConfig, *, caches_prefixes: bool) -> bool:
    """Makes vLLM's scheduler treat a model with states as one of attention alone. Returns whether prefix caching was on
    and is off now.

    caches_prefixes: whether prefix caching may stay on.

    Reason: vLLM decides for these models before it asks the platform (`MambaModelConfig`), and copies of the
    configuration are validated again.
    Remove when: `Platform` has a say in `is_prefix_caching_supported`.
    """
    cache = vllm_config.cache_config
    was_on = bool(cache.enable_prefix_caching)
    if not caches_prefixes:
        cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = vllm_config.model_config.max_model_len
    return was_on and not caches_prefixes


PROFILER_ACTIVITIES = {"cpu": ("CPU",), "cuda": ("CPU", "CUDA"), "hpu": ("CPU",)}
"""Activities of each device that torch's profiler records, in the words of vLLM's `ProfilerConfig`, which has none for
a Gaudi.
"""
