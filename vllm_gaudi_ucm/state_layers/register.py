"""The layers with a state that are served, and their registration with vLLM."""

from vllm_gaudi_ucm.state_layers.gated_delta import StatefulGatedDelta
from vllm_gaudi_ucm.state_layers.mamba2 import StatefulMixer2
from vllm_gaudi_ucm.state_layers.short_conv import StatefulShortConv
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer
from vllm_gaudi_ucm.vllm_api.attention import PluggableLayer
from vllm_gaudi_ucm.vllm_api.model import op_registry_oot
from vllm_gaudi_ucm.vllm_api.state_layers import MambaBase, MambaMixer2, QwenGatedDeltaNetAttention, ShortConv

STATE_LAYERS: dict[type[MambaBase], type[StateLayer]] = {
    MambaMixer2: StatefulMixer2,
    QwenGatedDeltaNetAttention: StatefulGatedDelta,
    ShortConv: StatefulShortConv,
}
"""vLLM's class of each layer, and ours."""


def register_state_layers() -> None:
    """Makes models that are built afterwards in this process use our layers. Safe to call more than once."""
    for layer, ours in STATE_LAYERS.items():
        if layer.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(ours, name=layer.__name__)
