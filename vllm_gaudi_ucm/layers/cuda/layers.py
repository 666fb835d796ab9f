"""Layers of vLLM that are one kernel each on CUDA: norms, rotary embedding, gated activations.

Cases that a kernel does not cover, and code that torch.compile traces, use torch's operators as in vLLM. vLLM's
`custom_ops` controls these layers: `--compilation-config '{"custom_ops": ["none"]}'` switches all of them off.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import can_norm, cuda_rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cuda.rotary import can_rotate, cuda_rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import Form, can_gate, cuda_gate
from vllm_gaudi_ucm.vllm_api.model import (
    CustomOp,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    GeluAndMul,
    GemmaRMSNorm,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    YaRNScalingRotaryEmbedding,
    op_registry_oot,
)

logger = plugin_logger(__name__)


class CudaRMSNorm(RMSNorm):
    """x -> weight * x / sqrt(mean(x^2) + eps), after adding the residual if there is one; then both are overwritten,
    as by vLLM's own kernels."""

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        has_weight = self.pass_weight if residual is None else self.pass_weight_add
        weight = self.weight if has_weight else None
        if torch.compiler.is_compiling() or not can_norm(x, weight, residual):
            return self.forward_native(x, residual)
        norm, total = cuda_rms_norm(
            x, weight, self.variance_epsilon, residual, variance_size=self.variance_size_override, in_place=True
        )
        return norm if total is None else (norm, total)


class CudaGemmaRMSNorm(GemmaRMSNorm):
    """x -> (1 + weight) * x / sqrt(mean(x^2) + eps), after adding the residual if there is one. Writes to neither, like
    the function that vLLM calls here.
    """

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or not can_norm(x, self.weight, residual):
            return self.forward_native(x, residual)
        norm, total = cuda_rms_norm(x, self.weight, self.variance_epsilon, residual, plus_one=True)
        return norm if total is None else (norm, total)


class CudaRotaryEmbedding(RotaryEmbedding):
    """Rotates the first elements of every head in place, in the product of query, key and value, like vLLM's own
    kernel.
    """

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.compiler.is_compiling():
            return self.forward_native(positions, query, key)
        angles = self._match_cos_sin_cache_dtype(query)
        if not can_rotate(query, key, positions, angles, self.head_size):
            return self.forward_native(positions, query, key)
        cuda_rotate(query, key, positions, angles, self.head_size, self.is_neox_style)
        return query, key


# Classes that differ from RotaryEmbedding only by their angles; vLLM finds a replacement by the class's own name.
class CudaLlama3RotaryEmbedding(CudaRotaryEmbedding, Llama3RotaryEmbedding):
    """Llama 3.1's angles."""


class CudaLinearScalingRotaryEmbedding(CudaRotaryEmbedding, LinearScalingRotaryEmbedding):
    """Positions divided by a factor."""


class CudaNTKScalingRotaryEmbedding(CudaRotaryEmbedding, NTKScalingRotaryEmbedding):
    """Angles of NTK scaling."""


class CudaDynamicNTKScalingRotaryEmbedding(CudaRotaryEmbedding, DynamicNTKScalingRotaryEmbedding):
    """Angles of dynamic NTK scaling by a factor."""


class CudaDynamicNTKAlphaRotaryEmbedding(CudaRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding):
    """Angles of dynamic NTK scaling by alpha."""


class CudaYaRNScalingRotaryEmbedding(CudaRotaryEmbedding, YaRNScalingRotaryEmbedding):
    """Angles of YaRN, with its magnitude."""


class CudaSiluAndMul(SiluAndMul):
    """x -> silu(x[:d]) * x[d:]."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not can_gate(x):
            return self.forward_native(x)
        return cuda_gate(x)


class CudaGeluAndMul(GeluAndMul):
    """x -> gelu(x[:d]) * x[d:], exact or by tanh."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._form: Form = "gelu_tanh" if self.approximate == "tanh" else "gelu"

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not can_gate(x):
            return self.forward_native(x)
        return cuda_gate(x, self._form)


LAYERS: dict[type[CustomOp], type[CustomOp]] = {
    RMSNorm: CudaRMSNorm,
    GemmaRMSNorm: CudaGemmaRMSNorm,
    RotaryEmbedding: CudaRotaryEmbedding,
    Llama3RotaryEmbedding: CudaLlama3RotaryEmbedding,
    LinearScalingRotaryEmbedding: CudaLinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding: CudaNTKScalingRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding: CudaDynamicNTKScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding: CudaDynamicNTKAlphaRotaryEmbedding,
    YaRNScalingRotaryEmbedding: CudaYaRNScalingRotaryEmbedding,
    SiluAndMul: CudaSiluAndMul,
    GeluAndMul: CudaGeluAndMul,
}


def register_cuda_layers() -> None:
    """Builds models that are loaded afterwards in this process with our layers. Safe to call more than once.

    Without Triton, vLLM's own layers stay, computed by torch's operators, and the log tells it.
    """
    missing = why_not_triton("cuda")
    if missing is not None:
        logger.warning("Norms, rotary embedding and gates run as torch's operators, which is slower: %s", missing)
        return
    for layer, ours in LAYERS.items():
        if layer.__name__ not in op_registry_oot:
            layer.register_oot(ours)
