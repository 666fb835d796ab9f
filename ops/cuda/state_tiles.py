"""Decides how kernels over tiles of rows multiply."""

from __future__ import annotations

from typing import NamedTuple

import torch


def block_of(size: int) -> int:
    """Returns the smallest block that a product takes for so many entries: a power of two, at least 16."""
    return max(1 << (size - 1).bit_length(), 16)


def are_multiplied(dtype: torch.dtype) -> bool:
    """Returns whether kernels over tiles multiply rows of this dtype. On a GPU these are rows of bfloat16: products of
    float32 take minutes to compile. Triton's interpreter compiles none.
    """
    from triton import knobs

    return dtype == torch.bfloat16 or bool(knobs.runtime.interpret)


class Products(NamedTuple):
    """Products of rows of one dtype. Sums are float32.

    operand: dtype of what is multiplied, also of numbers in between. precision: `input_precision` of Triton's products.
    inverse: the same for the larger blocks of an inverse, which is rounded to `operand` afterwards.
    """

    operand: torch.dtype
    precision: str
    inverse: str

    @classmethod
    def of_rows(cls) -> Products:
        """Returns products whose error is below the one of a result. See `are_multiplied`."""
        from triton import knobs

        # Triton's interpreter (3.9) has no matrix product of bf16
        wide = bool(knobs.runtime.interpret)
        return cls(torch.float32, "ieee", "ieee") if wide else cls(torch.bfloat16, "ieee", "tf32")
