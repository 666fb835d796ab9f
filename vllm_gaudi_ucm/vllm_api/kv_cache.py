"""Description of a KV cache: `vllm.v1.kv_cache_interface`, which asks for the platform when it is imported.

Extension point: `KVCacheSpec`, `AttentionSpec`, `FullAttentionSpec`, `SlidingWindowSpec`, `KVCacheConfig`,
`KVCacheGroupSpec` and `KVCacheLayout` are what a platform plugin's worker and attention backend are given and return.
Internal: specifications of a group whose layers differ (`UniformTypeKVCacheSpecs`), of keys which hold their values
(`MLAAttentionSpec`), of layers with chunks (`ChunkedLocalAttentionSpec`), with a state (`MambaSpec`) and without a
cache (`EncoderOnlyAttentionSpec`); `get_kv_cache_groups`, which makes the groups, and its parts: in `kv_cache_utils` of
vLLM 0.32, in `kv_cache_planning` of vLLM 0.33.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "AttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "IndexedLatentSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheLayout",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "buffers",
    "expected_groups",
    "groups_of",
    "in_blocks_of",
    "in_tiles",
    "keep_split_chunks",
    "keep_whole_contexts",
    "kept_tokens",
    "layer_specs",
    "num_whole_groups",
    "tokens_kept",
]


@dataclass(frozen=True, kw_only=True)
class IndexedLatentSpec(MLAAttentionSpec):
    """Latents, and keys of an indexer in the same blocks.

    Reason: `MLAAttentionSpec` has one tensor; vLLM's indexer keeps its keys in a layer of its own, with 8-bit codes.
    Remove when: `MLAAttentionSpec` has a second tensor of another dtype.

    index_size: elements of an indexer's key. index_dtype: their dtype.
    """

    index_size: int
    index_dtype: torch.dtype

    @property
    def state_content_size_bytes(self) -> int:
        """Returns the bytes of a token, which vLLM's page sizes are made of."""
        return self.head_size * self.dtype.itemsize + self.index_size * self.index_dtype.itemsize

    @classmethod
    def merge(cls, specs: list["IndexedLatentSpec"]) -> "IndexedLatentSpec":
        """Returns the specification of a group, whose layers must be alike."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("All layers in the same KV cache group must be the same.")
        return replace(specs[0])


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Returns the specification of each layer by name; layers of a group may differ in their sizes. In the scheduler
    such a layer has the heads of the first one, of sizes that make up its own bytes.

    Reason: `KVCacheConfig` has a specification for each group, which is a mapping if its layers differ. The scheduler's
    has the first layer's in place of the mapping; what is left of the others are the bytes of their pages.
    Remove when: `KVCacheConfig` can be asked for the specification of a layer.
    """
    specs: dict[str, KVCacheSpec] = {}
    pages = _page_bytes(config)
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            if isinstance(spec, UniformTypeKVCacheSpecs):
                specs[name] = spec.kv_cache_specs[name]
            elif isinstance(spec, FullAttentionSpec) and pages:
                specs[name] = _scaled(spec, pages[name], pages[group.layer_names[0]])
            else:
                specs[name] = spec
    return specs


def _page_bytes(config: KVCacheConfig) -> dict[str, int]:
    """Returns the bytes of each layer's page: the shorter of the ways to the next block and to the next layer."""
    return {
        name: min(tensor.block_stride, tensor.layer_stride)
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }


def _scaled(spec: FullAttentionSpec, page: int, first: int) -> FullAttentionSpec:
    if page == first:
        return spec
    return replace(spec, head_size=spec.head_size * page // first, head_size_v=spec.head_size_v * page // first)


def in_blocks_of(specs: Mapping[str, KVCacheSpec], size: int) -> dict[str, KVCacheSpec]:
    """Returns the same layers with blocks of `size` tokens: 1 if each token has a slot of its own.

    Reason: vLLM has one block size for allocation by its scheduler and for reading by attention. The size in the
    specifications decides for the scheduler.
    Remove when: `CacheConfig` has a size of its own for allocation.
    """
    return {name: _with_block_size(spec, size) for name, spec in specs.items()}


def groups_of(vllm_config: "VllmConfig", specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Returns the groups that the engine will make of a worker's layers, before it knows the number of blocks.

    Reason: the engine decides after asking for the memory that is left for the cache, but the memory of steps depends
    on the groups.
    Remove when: a worker is told the groups before it measures.
    """
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    except ImportError:
        # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups  # type: ignore[attr-defined, unused-ignore]

        return get_kv_cache_groups(vllm_config, dict(specs))
    # as the engine does: the platform names the builder, and a model may make its groups itself
    builder = get_kv_cache_config_builder(vllm_config)
    groups: list[KVCacheGroupSpec] = builder.get_kv_cache_groups(vllm_config, dict(specs))
    return groups


def num_whole_groups(specs: Mapping[str, KVCacheSpec]) -> int:
    """Returns how many groups the engine will make of the layers that see whole contexts.

    Reason: as for `expected_groups`.
    Remove when: as for `groups_of`.
    """
    groups = expected_groups(specs)
    return 1 if len(groups) == 1 else kept_tokens(groups).count(None)


def expected_groups(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Returns the groups that the engine will make if it may make several.

    Reason: as for `groups_of`, but before the layout is decided, which `groups_of` reads.
    Remove when: as for `groups_of`.
    """
    try:
        from vllm.v1.core import kv_cache_planning as planning  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        # vLLM 0.32
        from vllm.v1.core import kv_cache_utils as planning  # type: ignore[no-redef, unused-ignore]

    layers = dict(specs)
    if planning.is_kv_cache_spec_uniform(layers) or UniformTypeKVCacheSpecs.is_uniform_type(layers):
        return [KVCacheGroupSpec(list(layers), next(iter(layers.values())))]
    alike = planning.unify_kv_cache_spec_page_size(layers)
    groups: list[KVCacheGroupSpec] = planning._get_kv_cache_groups_uniform_page_size(alike)
    return groups


def kept_tokens(groups: Sequence[KVCacheGroupSpec]) -> list[int | None]:
    """Returns for each group how many tokens of a request its next token sees at most; None: all.

    Reason: as for `tokens_kept`.
    Remove when: as for `tokens_kept`.
    """
    return [tokens_kept(group.kv_cache_spec) for group in groups]


def tokens_kept(spec: KVCacheSpec) -> int | None:
    """Returns the same for a layer.

    Reason: vLLM has a class for each kind of layer, and no name for their common property.
    Remove when: `KVCacheSpec` has it.
    """
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window
    return spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None


def buffers(config: KVCacheConfig) -> dict[str, str]:
    """Returns for each layer the first one whose memory it shares: layers of several groups share memory, because a
    block belongs to one group at a time. Empty if there is one group.

    Reason: `KVCacheConfig.kv_cache_tensors` places pages in one allocation, while we have tensors for each layer.
    Remove when: `KVCacheConfig` names the layers that share memory, as `KVCacheTensor.shared_by` of vLLM 0.11 did.
    """
    owners: dict[str, str] = {}
    at: dict[int, str] = {}
    if len(config.kv_cache_groups) > 1:
        for tensor in config.kv_cache_tensors:
            for place, name in enumerate(tensor.layers):
                owners[name] = at.setdefault(tensor.offset + place * tensor.layer_stride, name)
    return owners


def keep_whole_contexts(specs: Mapping[str, KVCacheSpec], block_size: int) -> dict[str, KVCacheSpec]:
    """Returns layers with a sliding window, or chunks, as layers whose requests keep all of their blocks.

    Reason: vLLM frees blocks behind a window, which connectors, swaps and other movers of blocks are not ready for.
    With `--disable-hybrid-kv-cache-manager` it does not free them if windows and whole contexts are mixed, but does if
    all layers have a window.
    Remove when: it keeps blocks of windows there, too.
    """
    found = dict(specs)
    for name, spec in specs.items():
        if isinstance(spec, SlidingWindowSpec):
            found[name] = replace(_whole(spec, block_size), sliding_window=spec.sliding_window)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            found[name] = replace(_whole(spec, block_size), attention_chunk_size=spec.attention_chunk_size)
    return found


def keep_split_chunks(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Does the same for layers with chunks that may begin within a block; other layers do not change.

    Reason: for these vLLM's prefix cache can end a hit within a chunk whose first block it does not have. It checks a
    shortened hit again, but not if the model has full attention as well as chunks.
    Remove when: it looks again there, too.
    """
    found = dict(specs)
    for name, spec in specs.items():
        if isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size % spec.block_size:
            found.update(keep_whole_contexts({name: spec}, spec.block_size))
    return found


def _whole(spec: AttentionSpec, block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
    )


def in_tiles(config: KVCacheConfig, tile: int) -> KVCacheConfig:
    """A cache with blocks of one token, as a worker allocates it: tile 0 is the dummy block, and the tiles behind it
    hold all slots but vLLM's null slot.

    Reason: as for `in_blocks_of`.
    Remove when: as for `in_blocks_of`.
    """
    groups = [
        replace(group, kv_cache_spec=_with_block_size(group.kv_cache_spec, tile)) for group in config.kv_cache_groups
    ]
    return replace(config, num_blocks=1 - (1 - config.num_blocks) // tile, kv_cache_groups=groups)


def _with_block_size(spec: KVCacheSpec, size: int) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {name: _with_block_size(layer, size) for name, layer in spec.kv_cache_specs.items()}
        return replace(spec, block_size=size, kv_cache_specs=layers)
    return replace(spec, block_size=size)
