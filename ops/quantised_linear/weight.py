"""A quantised weight, the form into which every checkpoint's format is read, defined alike for all implementations."""

from typing import NamedTuple

import torch
from torch import Tensor

# Rows that are dequantised at a time, which bounds the scratch memory of a large layer.
CHUNK_ROWS = 2048
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a 4-bit float, by its low three bits. Each of them is an e4m3, too."""


class RowRounding(NamedTuple):
    """The rounding of rows.

    symmetric: zero is 0. Otherwise the range of a row, including 0, is spread over all codes.
    scale: float32, one for all rows; values beyond its range are clamped to it. None: each row has its own.
    zero: one for all rows, an integer as float32; None: 0, or each row has its own.
    """

    symmetric: bool = True
    scale: Tensor | None = None
    zero: Tensor | None = None

    def fixed(self) -> Tensor | None:
        """float32 [2], the scale and zero of all rows; None: each row has its own."""
        if self.scale is None:
            return None
        zero = torch.zeros_like(self.scale) if self.zero is None else self.zero
        return torch.stack((self.scale.reshape(()), zero.reshape(()))).float()


class RowNarrowing(NamedTuple):
    """The rounding of rows to 8-bit floats, measured before; see `narrowed_rows.py`.

    scale, inverse: float32, of all rows. largest: the largest magnitude of a code.
    """

    scale: Tensor
    inverse: Tensor
    largest: float

    def pair(self) -> Tensor:
        """Returns float32 [2], scale and inverse."""
        return torch.stack((self.scale.reshape(()), self.inverse.reshape(()))).float()


class QuantisedWeight(NamedTuple):
    """Element (o, i) is (codes[o, i] - zeros[r, c]) * scales[r, c], with r = o // block[0], c = i // block[1].

    codes: [outputs, inputs], e4m3, int8 or uint8.
    scales: float32 [ceil(outputs / block[0]), ceil(inputs / block[1])].
    block: outputs and inputs that share a scale.
    zeros: like `scales`, integers; None: all zero.
    rounding: how the checkpoint rounds rows before they are multiplied; None: not at all. On a device without products
        of integers, rows are not rounded either, which is more exact.
    narrowing: how rows are rounded to 8-bit floats on every device; None: not at all, or as a product likes.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    rounding: RowRounding | None = None
    narrowing: RowNarrowing | None = None

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def by_channel(self) -> bool:
        """True if an output has one scale."""
        return self.block[1] >= self.inputs

    def check(self) -> None:
        """Raises ValueError if the parts do not fit each other, for example if the scales belong to another layer."""
        rows, columns = (-(-size // step) for size, step in zip(self.codes.shape, self.block, strict=True))
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if part is not None and part.shape != (rows, columns):
                raise ValueError(
                    f"a quantised weight of {self.outputs} outputs and {self.inputs} inputs in blocks of {self.block} "
                    f"has {name} of {tuple(part.shape)}, expected ({rows}, {columns})"
                )


def dequantise(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the plain weight [outputs, inputs]: each product is computed in float32 and rounded once.

    A float32 product of a code and a scale is exact except for its own rounding: codes have at most 8 bits.
    """
    found = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
    step = max(CHUNK_ROWS // weight.block[0], 1) * weight.block[0]
    for start in range(0, weight.outputs, step):
        rows = slice(start, start + step)
        codes = weight.codes[rows].float()
        if weight.zeros is not None:
            codes -= _spread(weight.zeros, weight, start, len(codes))
        found[rows] = codes.mul_(_spread(weight.scales, weight, start, len(codes)))
    return found


def _spread(part: Tensor, weight: QuantisedWeight, start: int, rows: int) -> Tensor:
    """Spreads `part` over the elements of `rows` outputs; broadcastable if an output has one value."""
    first = start // weight.block[0]
    last = -(-(start + rows) // weight.block[0])
    found = part[first:last].float()
    if weight.block[0] > 1:
        found = found.repeat_interleave(weight.block[0], 0)[:rows]
    return found if weight.by_channel else found.repeat_interleave(weight.block[1], 1)[:, : weight.inputs]


def unpack_integers(packed: Tensor, bits: int, dim: int) -> Tensor:
    """uint8: the unsigned integers of `bits` bits (4 or 8) in each int32 along `dim`, lowest bits first."""
    if bits not in (4, 8):
        raise ValueError(f"integers of {bits} bits are not packed evenly; expected 4 or 8")
    dim %= packed.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    # the mask removes the sign bits that an arithmetic shift of a negative number brings in
    found = (packed.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.to(torch.uint8).flatten(-2).movedim(-1, dim)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """e4m3 [outputs, inputs] of uint8 [outputs, inputs / 2]: two 4-bit floats per byte, the low half first. Exact."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device).to(torch.float8_e4m3fn)
    # both halves of a byte at once, as the bit patterns of two e4m3
    byte = torch.arange(256, device=packed.device)
    pairs = values.view(torch.uint8)[torch.stack((byte & 15, byte >> 4), 1)].view(torch.int16).flatten()
    found = pairs.index_select(0, packed.flatten().int()).view(torch.float8_e4m3fn)
    return found.view(*packed.shape[:-1], -1)


def scales_of_exponents(exponents: Tensor) -> Tensor:
    """float32: 2 ** (exponent - 127) of uint8 (e8m0); 255 is NaN, and so is its scale."""
    one = torch.ones(exponents.shape, device=exponents.device)
    values = torch.ldexp(one, exponents.int() - 127)
    return torch.where(exponents == 255, torch.nan, values)
