"""Layers of vLLM that are computed in fewer operations on a CPU: norm, rotary embedding, gated activation."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.cpu.host_memory import keep_freed_memory
from vllm_gaudi_ucm.ops.cpu.native.build import INSTALL
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary import can_rotate, rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul
from vllm_gaudi_ucm.vllm_api.model import (
    CustomOp,
    ForwardContext,
    GemmaRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    get_forward_context,
    is_forward_context_available,
    op_registry_oot,
)

logger = plugin_logger(__name__)


class FusedRMSNorm(RMSNorm):
    """x -> weight * x / sqrt(mean(x^2) + eps), after adding the residual if there is one; then both are overwritten,
    as by vLLM's own kernels.

    In half precision the sum with the residual is not rounded for the norm, as vLLM defines it.
    """

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.variance_size_override is not None:
            return self.forward_native(x, residual)
        if residual is None:
            return rms_norm(x, self.weight if self.pass_weight else None, self.variance_epsilon)
        weight = self.weight if self.pass_weight_add else None
        return rms_norm(x, weight, self.variance_epsilon, residual), residual


class FusedGemmaRMSNorm(GemmaRMSNorm):
    """x -> (1 + weight) * x / sqrt(mean(x^2) + eps), after adding the residual if there is one. Writes to neither, like
    the function that vLLM calls here. In half precision it is vLLM's own computation, which rounds once, after the
    weight.
    """

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float32 or self.weight.dtype != torch.float32:
            return self.forward_native(x, residual)
        total = x if residual is None else x + residual
        # norms of queries and keys have the heads as rows
        norm = rms_norm(total.flatten(0, -2), self.weight + 1.0, self.variance_epsilon).view(total.shape)
        return norm if residual is None else (norm, total)


class _Angles(NamedTuple):
    """[rows, 1, head size]: cos twice, and sin with the sign of its half. `step` owns them."""

    step: ForwardContext
    cos: torch.Tensor
    sin: torch.Tensor


class StepRotaryEmbedding(RotaryEmbedding):
    """Rotates halves (NeoX style) of whole heads in place: (a, b) -> (a cos - b sin, b cos + a sin).

    Without native kernels the angles are looked up once per step, in float32.
    All layers of a model share this object and the positions of a step. A step is identified by its forward context,
    which vLLM makes for each step; the positions' tensor may be the same buffer in all steps.
    """

    _angles: _Angles | None = None

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.is_neox_style and key is not None and can_rotate(query, key, positions, self.cos_sin_cache):
            rotate(query, key, positions, self.cos_sin_cache, self.head_size)
            return query, key
        covered = self.is_neox_style and self.rotary_dim == self.head_size and query.dtype == torch.float32
        if not covered or positions.dim() != 1 or not is_forward_context_available():
            return self.forward_native(positions, query, key)
        angles = self._angles_of_step(positions)
        return self._rotate(query, angles), None if key is None else self._rotate(key, angles)

    def _angles_of_step(self, positions: torch.Tensor) -> _Angles:
        step = get_forward_context()
        if self._angles is None or self._angles.step is not step:
            cos, sin = self.cos_sin_cache.index_select(0, positions).float().unsqueeze(1).chunk(2, dim=-1)
            self._angles = _Angles(step, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        return self._angles

    def _rotate(self, x: torch.Tensor, angles: _Angles) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        swapped = heads.roll(self.head_size // 2, -1)
        return (heads * angles.cos).addcmul_(swapped, angles.sin).view(x.shape)


class FusedSiluAndMul(SiluAndMul):
    """x -> silu(x[:d]) * x[d:]."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)


LAYERS: dict[type[CustomOp], type[CustomOp]] = {
    RMSNorm: FusedRMSNorm,
    GemmaRMSNorm: FusedGemmaRMSNorm,
    RotaryEmbedding: StepRotaryEmbedding,
    SiluAndMul: FusedSiluAndMul,
}


def register_cpu_layers() -> None:
    """Builds models that are loaded afterwards in this process with our layers. Safe to call more than once.

    A decode step of a small model is some two thousand operations of a few microseconds; these layers are a quarter of
    them. Each falls back to torch's or vLLM's own computation for cases that it does not cover.
    """
    keep_freed_memory()
    # a first start on a machine builds the kernels, in the seconds in which the model is loaded
    threading.Thread(target=_load_kernels, name="native-kernels", daemon=True).start()
    for layer, ours in LAYERS.items():
        if layer.__name__ not in op_registry_oot:
            layer.register_oot(ours)


def _load_kernels() -> None:
    if native() is None:
        missing = "Native CPU kernels are missing, torch's operations are used instead and are slower: %s; %s"
        logger.warning(missing, why_not_native(), INSTALL)
