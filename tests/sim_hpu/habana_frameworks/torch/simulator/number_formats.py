"""Number formats of the card: which tensors may be there, and how large an 8-bit float gets."""

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

FORMATS = 26
_MISSING = frozenset({torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64})
_E4M3_NAN = 0x7F
# magnitude of the largest number, as its seven bits
_LARGEST_BITS = {240.0: 0x77, 448.0: 0x7E}


def largest(dtype: torch.dtype) -> float:
    """Where a float saturates: on a Gaudi 2 an e4m3 has no more than 240."""
    if dtype == torch.float8_e4m3fn and duties.on(FORMATS):
        return 448.0 if card.is_gaudi3() else 240.0
    return torch.finfo(dtype).max


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in an 8-bit float format, those beyond its range at its end; NaN stays NaN."""
    limit = largest(dtype)
    return values.float().clamp(-limit, limit).to(dtype)


def check_format(dtype: torch.dtype) -> None:
    """Raises HpuConstraintError for a format that the card lacks."""
    if dtype in _MISSING or (dtype == torch.float16 and not card.accepts_float16):
        duties.refuse(FORMATS, "tensor", f"{dtype} does not exist on the card", "use bfloat16, float32 or int32")


def spoil_beyond_range(tensor: Tensor) -> None:
    """A tensor becomes the card's: what a Gaudi 2 takes for infinities in an e4m3 made elsewhere is NaN here."""
    if tensor.dtype == torch.float8_e4m3fn and largest(tensor.dtype) == 240.0 and duties.on(FORMATS):
        _spoil_beyond(tensor)


def _spoil_beyond(tensor: Tensor) -> None:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        bits = tensor.detach().view(torch.uint8)
        magnitude = bits & 0x7F
        beyond = (magnitude > _LARGEST_BITS[240.0]) & (magnitude != _E4M3_NAN)
        if not bool(beyond.any()):
            return
        finding = f"{int(beyond.sum())} numbers beyond 240 in an e4m3 tensor on a Gaudi 2"
        remedy = "halve fp8 weights and double their scales when they are loaded"
        if duties.spoils(FORMATS, "tensor", finding, remedy):
            bits.masked_fill_(beyond, _E4M3_NAN)
