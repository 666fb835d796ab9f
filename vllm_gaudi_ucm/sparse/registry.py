"""The registry of sparse methods, including methods of third parties."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.registry import Registry, RegistryError

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.sparse.options import MethodOptions

ENTRY_POINTS = "vllm_gaudi_ucm.sparse_methods"
"""Group of the entry points `NAME = "package.module:ClassName"` that name methods of installed packages."""

SPARSE_METHODS: Registry[type[UcmSparseBase]] = Registry(
    "sparse method",
    ENTRY_POINTS,
    GSA="vllm_gaudi_ucm.sparse.methods.gsa:GSA",
    ESA="vllm_gaudi_ucm.sparse.methods.gsa:ESA",
    KVStar="vllm_gaudi_ucm.sparse.methods.kvstar:KVStar",
)


class SparseMethodError(ValueError):
    """A sparse method is not known, cannot be loaded, or does not follow the interface."""


def method_class(name: str) -> type[UcmSparseBase]:
    """Imports and returns the class of a method. Raises `SparseMethodError`."""
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase

    try:
        found = SPARSE_METHODS.get(name)
    except RegistryError as error:
        raise SparseMethodError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, UcmSparseBase)):
        place = f"sparse method {name!r}: {SPARSE_METHODS.place(name)}"
        raise SparseMethodError(f"{place}: found {found!r}, expected a subclass of UcmSparseBase")
    return found


def options_class(name: str) -> type[MethodOptions]:
    """Returns the model of a method's options. Raises `SparseMethodError`."""
    from vllm_gaudi_ucm.sparse.options import MethodOptions

    options = method_class(name).Options
    if not (isinstance(options, type) and issubclass(options, MethodOptions)):
        raise SparseMethodError(f"sparse method {name!r}: Options is {options!r}, expected a MethodOptions")
    return options
