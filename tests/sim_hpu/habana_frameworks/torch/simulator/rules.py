"""What the card refuses, or does wrongly without a word: shapes that depend on data, and indices out of range."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator.constraint import HpuConstraintError

import torch
from torch import Tensor
from torch._ops import OpOverload

_HOST_READS = frozenset({"is_nonzero"})
_MASKS = (torch.bool, torch.uint8)
_INDEXED_BY_LIST = ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
_INDEXED_ALONG_DIM = (
    *("index_select", "index_copy", "index_copy_", "index_add", "index_add_", "index_fill", "index_fill_"),
    *("index_reduce", "index_reduce_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"),
    *("scatter_reduce", "scatter_reduce_"),
)

Named = Mapping[str, Any]


def named_arguments(func: OpOverload, args: Sequence[Any], kwargs: Named) -> Named:
    """All arguments that were given, by the names of the operator's schema."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def reads_host(func: OpOverload) -> bool:
    """Whether the result is a Python value."""
    return torch.Tag.data_dependent_output in func.tags or _name(func) in _HOST_READS


def has_dynamic_shape(func: OpOverload, named: Named) -> str | None:
    """Why the shape of the result depends on the contents of a tensor, None if it does not."""
    name = _name(func)
    if name in _INDEXED_BY_LIST:
        masked = any(index is not None and index.dtype in _MASKS for index in named["indices"])
        return "boolean-mask indexing" if masked else None
    if torch.Tag.dynamic_output_shape not in func.tags or named.get("output_size") is not None:
        return None
    return "the shape of the result depends on the contents of a tensor"


def check_operator(func: OpOverload, named: Named) -> None:
    """Raises HpuConstraintError for an index out of range (negative ones too) and for reductions that do not exist."""
    name = _name(func)
    check = _CHECKS.get(name)
    if check is None:
        return
    for index, size in check(named):
        if index.dtype in _MASKS or index.numel() == 0:
            continue
        low, high = (int(bound) for bound in torch.aminmax(index.detach()))
        if low < 0 or high >= size:
            raise HpuConstraintError(
                func, f"index {low if low < 0 else high} is out of range, expected 0 to {size - 1}"
            )
    if name.startswith("index_reduce"):
        _check_index_reduce(func, named)


def _name(func: OpOverload) -> str:
    return func._schema.name.rpartition("::")[2]


def _along_dim(named: Named) -> Iterator[tuple[Tensor, int]]:
    """A scalar tensor has one element along its only dimension."""
    tensor = named["self"]
    yield named["index"], tensor.shape[named["dim"]] if tensor.dim() else 1


def _by_list(named: Named) -> Iterator[tuple[Tensor, int]]:
    """Each index takes one dimension, a mask as many as it has."""
    dim = 0
    for index in named["indices"]:
        if index is not None:
            yield index, named["self"].shape[dim]
        dim += index.dim() if index is not None and index.dtype in _MASKS else 1


def _by_row(named: Named) -> Iterator[tuple[Tensor, int]]:
    yield named["indices"], named["weight"].shape[0]


def _flat(named: Named) -> Iterator[tuple[Tensor, int]]:
    yield named["index"], named["self"].numel()


def _check_index_reduce(func: OpOverload, named: Named) -> None:
    found = named["reduce"], named["dim"], named.get("include_self", True)
    if found != ("amax", 0, True):
        raise HpuConstraintError(
            func, f"reduce={found[0]!r}, dim={found[1]}, include_self={found[2]}; only 'amax', 0, True exist"
        )


_CHECKS: dict[str, Callable[[Named], Iterator[tuple[Tensor, int]]]] = {
    **dict.fromkeys(_INDEXED_ALONG_DIM, _along_dim),
    **dict.fromkeys(_INDEXED_BY_LIST, _by_list),
    **dict.fromkeys(("embedding",), _by_row),
    **dict.fromkeys(("take", "put", "put_"), _flat),
}
