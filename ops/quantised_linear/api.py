"""Linear layers with quantised weights: chooses the form in which a device keeps them, and the product with it.

A device without a form of its own gets plain weights. `dequantise` defines the result of all products;
`rounding.multiply_rounded` defines products of rows rounded to integers, `narrowed_rows.multiply_narrowed` of rows
rounded to 8-bit floats by a measured scale.
"""

from collections.abc import Callable

from vllm_gaudi_ucm.ops.quantised_linear.narrowed_rows import NarrowedRows
from vllm_gaudi_ucm.ops.quantised_linear.product import Product, Target
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, dequantise
from vllm_gaudi_ucm.registry import Registry, those_installed

__all__ = ["Product", "QuantisedWeight", "Target", "choose_product", "dequantise"]


_PRODUCTS: Registry[Callable[[QuantisedWeight, Target], Product | None]] = Registry(
    "product with quantised weights",
    **those_installed(
        cpu="vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8:choose",
        cuda="vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.products:choose",
        hpu="vllm_gaudi_ucm.ops.quantised_linear.impl.hpu.products:choose",
    ),
)


def choose_product(weight: QuantisedWeight, target: Target) -> Product | None:
    """Chooses the product with such a weight in quantised form; None if plain weights are as good or the only way."""
    of_device = _PRODUCTS.get(target.device)(weight, target) if target.device in _PRODUCTS else None
    if of_device is None and weight.narrowing is not None:
        return NarrowedRows(None, weight, target.dtype)
    return of_device
