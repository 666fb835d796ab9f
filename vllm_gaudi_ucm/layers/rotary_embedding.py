"""Rotary embedding in place; without native kernels with angles that are looked up once per step, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gaudi_ucm.ops.rotary.api import can_rotate, rotate
from vllm_gaudi_ucm.vllm_api.model import (
    ForwardContext,
    RotaryEmbedding,
    get_forward_context,
    is_forward_context_available,
    op_registry_oot,
)


class _Angles(NamedTuple):
    """[rows, 1, head size]: cos twice, and sin with the sign that its half takes. `step` owns them."""

    step: ForwardContext
    cos: torch.Tensor
    sin: torch.Tensor


class StepRotaryEmbedding(RotaryEmbedding):
    """Rotates halves (NeoX style) of whole heads: (a, b) -> (a cos - b sin, b cos + a sin).

    All layers of a model share this object and the positions of a step. A step is known by its forward context, which
    vLLM makes anew for each: the positions' tensor may be the same buffer again.
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


def register() -> None:
    if RotaryEmbedding.__name__ not in op_registry_oot:
        RotaryEmbedding.register_oot(StepRotaryEmbedding)
