"""A model of Transformers whose linear layers multiply rows that are rounded to 8-bit floats, as a Gaudi's do."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.engine.reference_model import ReferenceModel
from vllm_gaudi_ucm.ops.narrow_floats import E4M3

# the form of experts and of this layer on a Gaudi: plain weights, and rows as they are
PLAIN = (".experts.", "kv_b_proj")
# An element on the other side of a tie is an eighth of itself away, where a code of 8 bits would be a 127th of the
# largest: logprobs of its row may be off by as much more.
NEAR = 1.0


def narrow_rows(reference: ReferenceModel, pattern: str, largest: float) -> None:
    """Rounds the rows of linear layers whose names match. largest: the largest magnitude of the card's e4m3."""

    def rounded(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        (x,) = inputs
        scale = x.abs().amax(-1, keepdim=True) / largest
        scale = torch.where(scale > 0, scale, 1)
        return ((x / scale).to(E4M3).float() * scale,)

    for name, layer in reference.model.named_modules():
        if (
            isinstance(layer, nn.Linear | Conv1D)
            and re.match(pattern, name)
            and not any(part in name for part in PLAIN)
        ):
            layer.register_forward_pre_hook(rounded)
