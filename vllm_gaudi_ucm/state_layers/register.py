"""The layers with a state that are served, and their registration with vLLM for a model that has some.

vLLM's modules of such layers take part of a second to import, which no other model needs.
"""

from __future__ import annotations

from vllm_gaudi_ucm.vllm_api.attention import PluggableLayer
from vllm_gaudi_ucm.vllm_api.model import op_registry_oot

STATE_LAYERS = ("MambaMixer2", "QwenGatedDeltaNetAttention", "ShortConv")
"""The names of vLLM's classes."""


def register_state_layers() -> None:
    """Makes models that are built afterwards in this process use our layers. Safe to call more than once."""
    from vllm_gaudi_ucm.state_layers.gated_delta import StatefulGatedDelta
    from vllm_gaudi_ucm.state_layers.mamba2 import StatefulMixer2
    from vllm_gaudi_ucm.state_layers.state_layer import StatefulShortConv

    for name, ours in zip(STATE_LAYERS, (StatefulMixer2, StatefulGatedDelta, StatefulShortConv), strict=True):
        if name not in op_registry_oot:
            PluggableLayer.register_oot(ours, name=name)


def is_registered(layer: type) -> bool:
    """Returns whether this is one of our layers with a state."""
    return layer in [op_registry_oot.get(name) for name in STATE_LAYERS]
