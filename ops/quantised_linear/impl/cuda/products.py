"""Chooses the product with a quantised weight on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import CudaCodes, CudaFp8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.int8 import CudaInt8
from vllm_gaudi_ucm.ops.quantised_linear.narrowed_rows import NarrowedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.quantised_linear.api import Product, QuantisedWeight, Target


def choose(weight: QuantisedWeight, target: Target) -> Product | None:
    """See `choose_product`."""
    if weight.narrowing is not None:
        # not the scaled product, which would round rows once more
        plain = weight._replace(narrowing=None)
        return NarrowedRows(CudaCodes(plain) if CudaCodes.covers(plain) else None, weight, target.dtype)
    if CudaInt8.covers(weight):
        return CudaInt8(weight)
    if CudaFp8.covers(weight, target.dtype):
        return CudaFp8(weight)
    return CudaCodes(weight) if CudaCodes.covers(weight) else None
