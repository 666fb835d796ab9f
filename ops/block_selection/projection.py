"""The rotation before the signs of `hash` summaries: drawn from a fixed seed, so the same on every rank and device."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.summary_kind import BITS_PER_BYTE

_SEED = 20_250_117
_made: dict[tuple[int, torch.device], Tensor] = {}


def projection(dim: int, device: torch.device) -> Tensor:
    """fp32 [bits, dim] with orthonormal columns, bits = dim rounded up to whole bytes.

    The first call for a device copies to it, so it must not be in a captured graph: `new_summaries` makes it.
    Orthonormal directions estimate a product with less noise than independent ones (RaBitQ, arXiv 2405.12497).
    """
    key = dim, device
    if key not in _made:
        bits = -(-dim // BITS_PER_BYTE) * BITS_PER_BYTE
        gaussian = torch.randn(bits, bits, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
        rotation, _ = torch.linalg.qr(gaussian)
        _made[key] = rotation[:, :dim].float().contiguous().to(device)
    return _made[key]
