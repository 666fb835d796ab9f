"""The layers of models that are served: others are refused while a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.cache_group import is_served
from vllm_gaudi_ucm.layers.experts import ServedMoeRunner
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.indexer import is_indexer_cache
from vllm_gaudi_ucm.vllm_api.model import ChunkedLocalAttention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl


class ServedLayers(dict[str, Any]):
    """vLLM's `static_forward_context`: layer names to layers, which register themselves while a model is built.

    Layers with a state of their own beyond the tokens of a step are registered here: attention of every kind, recurrent
    layers, mixtures of experts. Layers of the registered kinds of cache groups and our mixture of experts are
    supported, and further arguments of attention are up to its implementation (`UnifiedAttentionImpl`). Subclasses mask
    differently, or cache different data: treating them like their base class would give wrong tokens.
    """

    def __setitem__(self, name: str, layer: Any) -> None:
        if is_indexer_cache(layer):
            # the layer of attention keeps the keys
            return
        if type(layer) is not ServedMoeRunner and not is_served(type(layer)):
            raise UnsupportedFeatureError(f"layers of the kind {type(layer).__name__}", f"the model's layer {name}")
        if isinstance(layer, ChunkedLocalAttention):
            window = cast("UnifiedAttentionImpl", layer.impl).window
            assert window == Window(layer.attention_chunk_size, chunked=True), "see chunk_of"
        super().__setitem__(name, layer)


def refuse_other_layers(vllm_config: VllmConfig) -> None:
    """Models that are built from now on raise UnsupportedFeatureError at the first such layer, before weights load."""
    vllm_config.compilation_config.static_forward_context = ServedLayers()
