"""Layers of vLLM that are computed by fused operators of Gaudi's software: norms and rotary embedding.

Every layer can be traced by torch.compile without a graph break, and holds no Python value that differs per layer. The
gate, silu(x) * y, stays vLLM's own: two operators of torch, for which Gaudi's software has no fused one.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_gaudi_ucm.layers.hpu.encoder_attention import GaudiEncoderAttention
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.hpu.operators import RMS_NORM, ROTARY
from vllm_gaudi_ucm.ops.rms_norm.impl.hpu.norm import gaudi_rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.hpu.rotary import RotaryTables, gaudi_rotate
from vllm_gaudi_ucm.vllm_api.model import (
    CustomOp,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    GeluAndMulSparse,
    GemmaRMSNorm,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MMEncoderAttention,
    NTKScalingRotaryEmbedding,
    RMSNorm,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
    op_registry_oot,
)

logger = plugin_logger(__name__)


class GaudiRMSNorm(RMSNorm):
    """x -> weight * x / sqrt(mean(x^2) + eps), after adding the residual if there is one. Writes to neither."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fused = RMS_NORM.resolve().call

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        has_weight = self.pass_weight if residual is None else self.pass_weight_add
        norm, total = gaudi_rms_norm(
            x,
            self.weight if has_weight else None,
            self.variance_epsilon,
            residual,
            variance_size=self.variance_size_override,
            fused=self._fused,
        )
        return norm if total is None else (norm, total)


class GaudiGemmaRMSNorm(GemmaRMSNorm):
    """x -> (1 + weight) * x / sqrt(mean(x^2) + eps), the product in float32, after adding the residual."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fused = RMS_NORM.resolve().call

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        wide = x.float() if residual is None else x.float() + residual.float()
        norm, _ = gaudi_rms_norm(wide, self.weight.float() + 1.0, self.variance_epsilon, fused=self._fused)
        return norm.to(x.dtype) if residual is None else (norm.to(x.dtype), wide.to(x.dtype))


class GaudiRotaryEmbedding(RotaryEmbedding):
    """Rotates the first elements of every head. All layers of a model share this object, and so one pair of tables."""

    cos_table: torch.Tensor
    sin_table: torch.Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fused = ROTARY.resolve().call
        if self._fused is not None:
            cos, sin = RotaryTables.from_angles(self.cos_sin_cache, self.is_neox_style)
            self.register_buffer("cos_table", cos, persistent=False)
            self.register_buffer("sin_table", sin, persistent=False)

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates query and key. positions: int [tokens]; query, key: [tokens, heads * head_size]."""
        fused = self._fused
        if fused is None or query.dtype not in (torch.bfloat16, torch.float32):
            return self.forward_native(positions, query, key)
        angles = RotaryTables(self.cos_table, self.sin_table).at(positions.flatten(), query.dtype)
        rotated = gaudi_rotate(query, angles, self.head_size, self.is_neox_style, fused)
        if key is None:
            return rotated, None
        return rotated, gaudi_rotate(key, angles, self.head_size, self.is_neox_style, fused)


class GaudiGeluAndMulSparse(GeluAndMulSparse):
    """Keeps the largest gates of a row, of Gemma 3n, and computes their threshold on the host while it is built.

    vLLM computes it on the device, by `erfinv`, which Gaudi's software is not known to have.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with torch.device("cpu"):
            super().__init__(*args, **options)


# Classes that differ from RotaryEmbedding only by their angles; vLLM finds a replacement by the class's own name.
class GaudiLlama3RotaryEmbedding(GaudiRotaryEmbedding, Llama3RotaryEmbedding):
    """Llama 3.1's angles."""


class GaudiLinearScalingRotaryEmbedding(GaudiRotaryEmbedding, LinearScalingRotaryEmbedding):
    """Positions divided by a factor."""


class GaudiNTKScalingRotaryEmbedding(GaudiRotaryEmbedding, NTKScalingRotaryEmbedding):
    """Angles of NTK scaling."""


class GaudiDynamicNTKScalingRotaryEmbedding(GaudiRotaryEmbedding, DynamicNTKScalingRotaryEmbedding):
    """Angles of dynamic NTK scaling by a factor."""


class GaudiDynamicNTKAlphaRotaryEmbedding(GaudiRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding):
    """Angles of dynamic NTK scaling by alpha."""


class GaudiYaRNScalingRotaryEmbedding(GaudiRotaryEmbedding, YaRNScalingRotaryEmbedding):
    """Angles of YaRN, with its magnitude."""


LAYERS: dict[type[CustomOp], type[CustomOp]] = {
    RMSNorm: GaudiRMSNorm,
    GemmaRMSNorm: GaudiGemmaRMSNorm,
    GeluAndMulSparse: GaudiGeluAndMulSparse,
    RotaryEmbedding: GaudiRotaryEmbedding,
    Llama3RotaryEmbedding: GaudiLlama3RotaryEmbedding,
    LinearScalingRotaryEmbedding: GaudiLinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding: GaudiNTKScalingRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding: GaudiDynamicNTKScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding: GaudiDynamicNTKAlphaRotaryEmbedding,
    YaRNScalingRotaryEmbedding: GaudiYaRNScalingRotaryEmbedding,
    MMEncoderAttention: GaudiEncoderAttention,
}


def register_gaudi_layers() -> None:
    """Builds models that are loaded afterwards in this process with our layers, and logs which operators they use.

    Safe to call more than once.
    """
    for layer, ours in LAYERS.items():
        if layer.__name__ not in op_registry_oot:
            layer.register_oot(ours)
    for operator in (RMS_NORM, ROTARY):
        found = operator.resolve()
        if found.call is None:
            logger.warning("%s by %s: %s", operator.title, operator.instead, found.why)
        else:
            logger.info("%s by %s", operator.title, found.why)
