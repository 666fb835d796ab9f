"""The layers that vLLM keeps beside a model; one of a kind that this plugin does not compute is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention import Attention

from vllm_gaudi_ucm.options.unsupported import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ServedLayers(dict[str, Any]):
    """vLLM's `static_forward_context`: layer names to layers, which enter themselves while a model is built.

    What has a state of its own beside the tokens of a step is entered here: attention of every kind, recurrent layers,
    mixtures of experts. Plain attention is all that is served, and what its own arguments add is up to its
    implementation (`UnifiedAttentionImpl`). Subclasses mask otherwise, or keep other things in the cache: to take them
    for what they derive from would give wrong tokens.
    """

    def __setitem__(self, name: str, layer: Any) -> None:
        if type(layer) is not Attention:
            raise UnsupportedFeatureError(f"layers of the kind {type(layer).__name__}", f"the model's layer {name}")
        super().__setitem__(name, layer)


def refuse_other_layers(vllm_config: VllmConfig) -> None:
    """Models that are built from now on raise UnsupportedFeatureError at the first such layer, before weights load."""
    vllm_config.compilation_config.static_forward_context = ServedLayers()
