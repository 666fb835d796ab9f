"""The KV-cache groups of an engine, derived from vLLM's groups and from the windows of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.attention_group import AttentionGroup
from vllm_gaudi_ucm.execution.encoder_group import EncoderGroup
from vllm_gaudi_ucm.execution.layer_groups import GroupLayer, LayerGroups
from vllm_gaudi_ucm.kv_cache.allocation import attention_layers, shared_with
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.runner.other_groups import leave_others, other_groups
from vllm_gaudi_ucm.speculation.draft_model import is_draft_layer
from vllm_gaudi_ucm.vllm_api.kv_cache import ChunkedLocalAttentionSpec as _CHUNKS
from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheGroupSpec, KVCacheSpec, kept_tokens, tokens_kept
from vllm_gaudi_ucm.vllm_api.model import EncoderOnlyAttention, has_attention, tokens_to_choose
from vllm_gaudi_ucm.vllm_api.stage_layers import names_whole_contexts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.execution.decoder import Decoder


def kv_groups(
    groups: Sequence[KVCacheGroupSpec], vllm_config: VllmConfig, *, of_draft_model: bool = False
) -> tuple[KvGroup, ...]:
    """Returns the groups: those with full attention first, then windows, the widest first. A stage of a pipeline may
    have no layers of some groups; it plans for these, too, so that all stages choose the same bucket.

    Layers of one of vLLM's groups belong to several groups here if they see differently far back, which happens with
    `--disable-hybrid-kv-cache-manager`. A layer that reads another layer's cache is in a group with the table of that
    layer.

    of_draft_model: whether to return only the groups of the draft model's layers. A draft model has separate steps, and
    the model's groups do not contain its layers.

    An encoder, whose layers keep nothing, has one group, for which vLLM has none.

    Raises:
        UnsupportedFeatureError: some layers keep keys and values, and others see both ways.
    """
    both_ways = _encoder_layers(vllm_config)
    if both_ways:
        if groups:
            raise UnsupportedFeatureError("layers that see both ways in a decoder", f"the model's layer {both_ways[0]}")
        return () if of_draft_model else (KvGroup(0, vllm_config.cache_config.block_size, None, both_ways),)
    layers = _implementations(vllm_config, of_draft_model)
    number_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    for name, layer in attention_layers(vllm_config).items():
        if has_attention(layer) and (target := shared_with(layer)) is not None:
            number_of[name] = number_of[target]
    found: dict[tuple[int, Window | None], list[str]] = {}
    for name, number in number_of.items():
        if name in layers:
            found.setdefault((number, layers[name].window), []).append(name)
    for number, (group, tokens) in enumerate(zip(groups, kept_tokens(groups), strict=True)):
        if not group.layer_names and not of_draft_model:
            found[number, None if tokens is None else Window(tokens, isinstance(group.kv_cache_spec, _CHUNKS))] = []
    if len(groups) == 1 and not of_draft_model and _others_see_all(vllm_config):
        # a group of the only table
        found.setdefault((0, None), [])
    chooses = tokens_to_choose(vllm_config) > 0
    made = [
        KvGroup(number, groups[number].kv_cache_spec.block_size, window, tuple(names), chooses)
        for (number, window), names in found.items()
    ]
    return tuple(sorted(made, key=lambda one: (0 if one.window is None else 1 / one.window.tokens, one.number)))


def _others_see_all(vllm_config: VllmConfig) -> bool:
    """Returns True if a stage of a pipeline, this one or another, is known to have layers with whole contexts."""
    return vllm_config.parallel_config.pipeline_parallel_size > 1 and names_whole_contexts(vllm_config)


def layer_groups(
    groups: Sequence[KVCacheGroupSpec], vllm_config: VllmConfig, *, of_draft_model: bool = False
) -> LayerGroups:
    """Returns these groups together with the groups of other kinds, and joins the layers to them."""
    found = kv_groups(groups, vllm_config, of_draft_model=of_draft_model)
    layers: dict[str, GroupLayer] = dict(_implementations(vllm_config, of_draft_model))
    if _encoder_layers(vllm_config):
        return LayerGroups.from_layers([EncoderGroup(group) for group in found], layers)
    others = () if of_draft_model else other_groups(vllm_config, found[0])
    context = attention_layers(vllm_config)
    layers |= {name: cast("GroupLayer", context[name]) for group in others for name in group.kv.layers}
    return LayerGroups.from_layers([*(AttentionGroup(group) for group in found), *others], layers)


def _encoder_layers(vllm_config: VllmConfig) -> tuple[str, ...]:
    layers = attention_layers(vllm_config).items()
    return tuple(name for name, layer in layers if isinstance(layer, EncoderOnlyAttention))


def leave_groups(vllm_config: VllmConfig) -> None:
    """Makes all layers leave their groups, and let go of what they keep of a KV cache that was given back."""
    for layer in _implementations(vllm_config, of_draft_model=False).values():
        layer.join(None)
    leave_others(vllm_config)


def _implementations(vllm_config: VllmConfig, of_draft_model: bool) -> dict[str, UnifiedAttentionImpl]:
    layers = attention_layers(vllm_config).items()
    return {
        name: cast("UnifiedAttentionImpl", layer.impl)
        for name, layer in layers
        if has_attention(layer) and is_draft_layer(name) == of_draft_model
    }


def described(groups: Sequence[KvGroup]) -> dict[str, Any]:
    """Returns the fields for the header of a phase log: for each group its layers, and the tokens that its rows see
    (None for all), at most if these are chunks. Empty if there is only one group with full attention.
    """
    if len(groups) == 1 and groups[0].window is None:
        return {}
    return {"kv_cache_groups": [_described(group) for group in groups]}


def _described(group: KvGroup) -> dict[str, Any]:
    window = group.window
    found = {"layers": len(group.layers), "window": None if window is None else window.tokens}
    return {**found, "chunked": True} if window is not None and window.chunked else found


def refuse_with_windows(decoder: Decoder, draft: Decoder | None, config: UcmConfig, vllm_config: VllmConfig) -> None:
    """Checks the layers once they are made. Raises UnsupportedFeatureError for features that need whole contexts, and
    separate keys and values of each layer, if the model has other layers.
    """
    # buckets, which both models use, count the blocks of the first group
    if draft is not None and draft.window != decoder.window:
        raise UnsupportedFeatureError(
            "a draft model whose layers see less, or more, than the model's (take one whose widest layers see as far)",
            "--speculative-config",
        )
    local = _described_windows(decoder)
    if local and config.kv_cache.granularity == "token":
        raise UnsupportedFeatureError(f"a slot for each token with {local}", "ucm.kv_cache.granularity token")
    if config.ucm_sparse_method is None:
        return
    shared = "a model with layers that share keys and values" if decoder.shares_caches else ""
    # layers that see whole contexts choose; the others run as without a method, even if a stage has only these
    some_choose = None in decoder.windows or _others_see_all(vllm_config)
    if not some_choose and vllm_config.parallel_config.pipeline_parallel_size > 1:
        local += ", or with a pipeline stage of such layers (take fewer stages)"
    if found := shared or (local if not some_choose else ""):
        raise UnsupportedFeatureError(
            f"the sparse method {config.ucm_sparse_method} with {found}", "ucm.ucm_sparse_method"
        )


def refuse_windows_in_one_table(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for memory mode if layers with windows keep whole contexts in the table of the
    other layers: they would read blocks of their windows that are offloaded.

    specs: spec of each layer that has a cache.
    """
    layers = _implementations(vllm_config, of_draft_model=False)
    windows = (specs[name] for name, layer in layers.items() if layer.window is not None and name in specs)
    if any(tokens_kept(spec) is None for spec in windows):
        raise UnsupportedFeatureError(
            "memory mode with layers with windows or chunks in the block table of those that see whole contexts (it "
            "needs vLLM's hybrid KV-cache manager, no more layers with whole contexts than with windows, and chunks of "
            "whole blocks; ucm.preemption.mode swap keeps blocks in host memory with one table, too)",
            "ucm.memory_mode",
        )


def _described_windows(decoder: Decoder) -> str:
    """Returns a description of the model for an error; empty if all layers see whole contexts."""
    windows = [window for window in decoder.windows if window is not None]
    if not windows:
        return ""
    if all(window.by_distance for window in windows):
        return "a model with ALiBi slopes"
    some = "alone" if None not in decoder.windows else "in some layers"
    if any(window.chunked for window in windows):
        return f"a model with chunked local attention {some}"
    return f"a model with a sliding window {some}"
