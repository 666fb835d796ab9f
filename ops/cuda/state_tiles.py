"""How kernels over tiles of rows multiply."""

from __future__ import annotations

from typing import NamedTuple

import torch


def block_of(size: int) -> int:
    """Returns the smallest block that a product takes for so many entries: a power of two, at least 16."""
    return max(1 << (size - 1).bit_length(), 16)


class Products(NamedTuple):
    """Products of rows of one dtype. Sums are float32.

    operand: dtype of what is multiplied, also of numbers in between. precision: `input_precision` of Triton's products.
    inverse: the same for an inverse, whose products cancel.
    """

    operand: torch.dtype
    precision: str
    inverse: str

    @classmethod
    def of(cls, dtype: torch.dtype) -> Products:
        """Returns products whose error is below the one of a result in this dtype."""
        from triton import knobs

        # Triton's interpreter (3.9) has no matrix product of bf16
        if dtype == torch.bfloat16 and not knobs.runtime.interpret:
            return cls(torch.bfloat16, "ieee", "tf32x3")
        # states may exceed the range of float16; tf32 has its precision
        return cls(torch.float32, "tf32", "tf32x3") if dtype == torch.float16 else cls(torch.float32, "ieee", "ieee")
