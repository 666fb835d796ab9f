"""Layers that keep a state for each request: `vllm.model_executor.layers.mamba`.

Extension point: `MambaMixer2`, `ShortConv` and `QwenGatedDeltaNetAttention`, `PluggableLayer`s, which a platform plugin
replaces as a whole.
Internal: `MambaBase`, their common base. `kv_cache` has `MambaSpec`, which describes what they keep.
"""

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

__all__ = ["MambaBase", "MambaMixer2", "QwenGatedDeltaNetAttention", "ShortConv"]
