"""Kernels of the card that torch does not have, as operators of the namespace `hpu`."""

import math

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError

import torch
from torch import Tensor

ROWS_PER_VECTOR = 8
VECTOR = 128

_library = torch.library.Library("hpu", "DEF")


def define_kernels() -> None:
    """Registers the operators; once per process."""
    _library.define("softmax_fa2(Tensor scores, *, Tensor inputM, Tensor inputL) -> (Tensor, Tensor, Tensor, Tensor)")
    _library.impl("softmax_fa2", _softmax_fa2, "CompositeExplicitAutograd")
    _library._register_fake("softmax_fa2", _softmax_fa2)


def _softmax_fa2(scores: Tensor, *, inputM: Tensor, inputL: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of a softmax that goes over keys in parts.

    scores: bf16 [..., rows, keys]. inputM, inputL: bf16 [..., padded]: maximum and sum of the parts before (-inf and 0
        at first), where row r stands at r // 8 * 128 + r % 8, and padded = ceil(rows / 8) * 128.

    Returns exp(scores - max) [..., rows, keys], and max, sum and exp(inputM - max) [..., padded]. What stands between
    the rows is not defined (NaN here). Source: the bridge's own test of this kernel.
    """
    _check_softmax_fa2(scores, inputM, inputL)
    rows = scores.shape[-2]
    before, total = _unpad(inputM, rows), _unpad(inputL, rows)
    top = torch.maximum(before, scores.amax(-1))
    weights = torch.exp(scores - top[..., None])
    fixup = torch.exp(before - top)
    return weights, _pad(top), _pad(fixup * total + weights.sum(-1)), _pad(fixup)


def _check_softmax_fa2(scores: Tensor, before: Tensor, total: Tensor) -> None:
    name = "hpu.softmax_fa2"
    if card.device_type != "synDeviceGaudi3":
        raise HpuConstraintError(name, f"needs a Gaudi 3, this card is {card.device_type}")
    padded = (*scores.shape[:-2], padded_rows(scores.shape[-2]))
    for argument, tensor, shape in (("inputM", before, padded), ("inputL", total, padded)):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise HpuConstraintError(name, f"{argument} is {found}, expected torch.bfloat16 {shape}")
    if scores.dtype != torch.bfloat16:
        raise HpuConstraintError(name, f"scores are {scores.dtype}, expected torch.bfloat16")


def padded_rows(rows: int) -> int:
    """Entries that the maxima of so many rows take."""
    return math.ceil(rows / ROWS_PER_VECTOR) * VECTOR


def _pad(values: Tensor) -> Tensor:
    rows = values.shape[-1]
    padded = values.new_full((*values.shape[:-1], padded_rows(rows)), float("nan"))
    vectors = padded.unflatten(-1, (-1, VECTOR))
    filled = torch.nn.functional.pad(values, (0, -rows % ROWS_PER_VECTOR), value=float("nan"))
    vectors[..., :ROWS_PER_VECTOR] = filled.unflatten(-1, (-1, ROWS_PER_VECTOR))
    return padded


def _unpad(padded: Tensor, rows: int) -> Tensor:
    return padded.unflatten(-1, (-1, VECTOR))[..., :ROWS_PER_VECTOR].flatten(-2)[..., :rows]
