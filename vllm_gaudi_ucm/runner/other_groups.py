"""KV-cache groups of layers without attention: which exist, their memory, and the features that exclude them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.config.exclusions import COMPACTION, MEMORY_MODE, PARTIAL_HITS, SWAP, TOKEN_SLOTS
from vllm_gaudi_ucm.execution.attention_group import AttentionGroup
from vllm_gaudi_ucm.execution.cache_group import CacheGroup, kind_of
from vllm_gaudi_ucm.execution.state_group import StateGroup
from vllm_gaudi_ucm.kv_cache.allocation import NO_CACHE, attention_layers, other_specs
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.speculation.draft_model import is_draft_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.exclusions import Option
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.distributed.ranks import Ranks
    from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec

logger = plugin_logger(__name__)

GIB = 1 << 30

_PREFIXES = "states for prefix caching stay on the device: take ucm.kv_cache.kept_states"
_SWAP = "ucm.preemption.mode swap moves states, too"
MOVES_BLOCKS: Mapping[Option, str] = {
    TOKEN_SLOTS: "a state is no slot of a token: leave the option out",
    PARTIAL_HITS: _PREFIXES,
    COMPACTION: "states stay where they are: leave the option out",
    SWAP: "states of blocks are not swapped: take recompute",
    MEMORY_MODE: _SWAP,
}
"""Options that move, copy or share parts of blocks, and leave the states of the blocks where they are; and what to do
instead.
"""


def other_groups(vllm_config: VllmConfig, first: KvGroup) -> list[CacheGroup]:
    """Returns the groups of layers without attention, one of each kind. They read the table of the first group.

    Raises:
        UnsupportedFeatureError: no kind is registered for the spec of a layer.
    """
    kinds: dict[type[CacheGroup], list[str]] = {}
    for name, spec in other_specs(vllm_config).items():
        kinds.setdefault(_kind(name, spec), []).append(name)
    return [kind.make(first._replace(window=None, layers=tuple(names)), vllm_config) for kind, names in kinds.items()]


def _kind(name: str, spec: KVCacheSpec) -> type[CacheGroup]:
    kind = kind_of(spec)
    if kind is None:
        wanted = "register a kind of cache group for it"
        raise UnsupportedFeatureError(f"layers that keep {type(spec).__name__} ({wanted})", f"the model's layer {name}")
    return kind


def refuse_uneven_stages(groups: LayerGroups, ranks: Ranks) -> None:
    """Raises UnsupportedFeatureError, on all workers, unless every stage of a pipeline has layers of each kind.

    All stages must divide a step in the same way, and a kind of state affects the division.
    """
    count = sum(not isinstance(group, AttentionGroup) for group in groups.groups)
    if ranks.size > 1 and ranks.most(count) != ranks.least(count):
        raise UnsupportedFeatureError(
            "stages of which some have layers with a state, and others have none (take one stage)",
            "--pipeline-parallel-size",
        )


def allocate_others(groups: LayerGroups, vllm_config: VllmConfig, num_blocks: int, device: torch.device) -> None:
    """Allocates data outside vLLM's blocks, and binds it to the layers. num_blocks: blocks of the KV cache."""
    specs, layers = other_specs(vllm_config), attention_layers(vllm_config)
    for group in groups.groups:
        own = {name: specs[name] for name in group.kv.layers if name in specs}
        for name, made in group.allocate(own, num_blocks, device).items():
            layers[name].bind_kv_cache(made)


def leave_others(vllm_config: VllmConfig) -> None:
    """Makes the layers let go of what `allocate_others` gave them."""
    layers = attention_layers(vllm_config)
    for name in other_specs(vllm_config):
        layers[name].bind_kv_cache(NO_CACHE)


def share_of_blocks(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> float:
    """Returns the bytes that layers without attention take for each block, as a share of the block's bytes.

    specs: specs of the layers with attention.
    """
    block_size = next(iter(specs.values())).block_size
    others = sum(
        _kind(name, spec).make(KvGroup(0, block_size), vllm_config).bytes_per_block(spec)
        for name, spec in other_specs(vllm_config).items()
    )
    return others / sum(one.page_size_bytes for one in specs.values())


def bytes_of_requests(vllm_config: VllmConfig) -> int:
    """Returns the bytes of the states of running requests, which layers take whatever the number of blocks."""
    first = KvGroup(0, vllm_config.cache_config.block_size)
    specs = other_specs(vllm_config).items()
    found = sum(_kind(name, spec).make(first, vllm_config).bytes_of_requests(spec) for name, spec in specs)
    if found:
        running = vllm_config.scheduler_config.max_num_seqs
        logger.info(
            "States of %d running requests (--max-num-seqs), and kept ones, take %.2f GiB", running, found / GIB
        )
    return found


def refuse_with_states(config: UcmConfig, vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for features that move, copy or share parts of blocks, if layers keep a state."""
    names = list(other_specs(vllm_config))
    if not names:
        return
    kinds = [kind_of(spec) for spec in other_specs(vllm_config).values()]
    # states of requests are swapped with their blocks; states of blocks are not
    swaps = all(kind is not None and issubclass(kind, StateGroup) and not kind.of_blocks for kind in kinds)
    asked_by = {
        option.words: instead
        for option, instead in MOVES_BLOCKS.items()
        if option.is_on(config) and not (option is SWAP and swaps)
    }
    if vllm_config.kv_transfer_config is not None:
        asked_by["--kv-transfer-config"] = _PREFIXES
    if any(map(is_draft_layer, names)):
        asked_by["--speculative-config (a draft model with such layers)"] = (
            "take n-grams, a draft model whose layers all have attention, or the model's own MTP layer"
        )
    if asked_by:
        flag, instead = next(iter(asked_by.items()))
        raise UnsupportedFeatureError(f"a model with layers that keep a state ({names[0]}; {instead})", flag)
