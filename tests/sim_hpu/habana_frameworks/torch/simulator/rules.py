"""What the card refuses, or does wrongly without a word: shapes that depend on data, bad indices, kernels it lacks."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties

import torch
from torch import Tensor
from torch._ops import OpOverload

# Operators of these namespaces the card has kernels or lowerings for; all others are opaque to it.
NAMESPACES = frozenset({"aten", "prims", "hpu", "c10d", "_c10d_functional", "symm_mem", "sim_hpu"})
MOST_STABLE = 37
_HOST_READS = frozenset({"is_nonzero", "host_read"})
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
    return {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}


@functools.cache  # torch makes a new list of new objects each time it is asked, for every operator that runs
def _argument_names(func: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


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
    """Raises HpuConstraintError for an index out of range (negative ones too), and for one row written twice.

    Counts operators that have no kernel in this form and run on the host (duties 19 and 20).
    """
    name = _name(func)
    indices = _INDICES.get(name)
    if indices is not None and duties.on(17):
        for index, size in indices(named):
            _check_range(func, index, size)
    fallback = _FALLBACKS.get(name)
    if fallback is not None:
        fallback(func, named)
    if name in ("index_copy", "index_copy_") and duties.on(18):
        _check_unique(func, named)


def _check_range(func: OpOverload, index: Tensor, size: int) -> None:
    if index.dtype in _MASKS or index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index.detach()))
    if low < (-1 if may_be_minus_one(func) else 0) or high >= size:
        bad = low if low < 0 else high
        remedy = "clamp on the host, and point pads at a row of their own"
        duties.refuse(17, func, f"index {bad} is out of range, expected 0 to {size - 1}", remedy)


def may_be_minus_one(func: OpOverload) -> bool:
    """Whether -1 is a pad, as vllm-gaudi takes it to be; only where that is asked for."""
    return duties.minus_one and _name(func) in ("index_select", "index_copy", "index_copy_", "one_hot")


def _check_unique(func: OpOverload, named: Named) -> None:
    """Rows of pads may be written twice: nobody reads them."""
    index, (_, size) = named["index"].flatten(), next(_along_dim(named))
    rows, counts = torch.unique(index, return_counts=True)
    twice = rows[counts > 1]
    wrong = twice[(twice > 0) & (twice < size - duties.pad_rows)]
    if wrong.numel():
        duties.refuse(
            18,
            func,
            f"index {int(wrong[0])} is written twice, of {size} rows; which value stays is not defined",
            f"only row 0 and the last {duties.pad_rows} (SIM_HPU_PAD_ROWS) may be pads",
        )


@functools.cache
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


def _classes(named: Named) -> Iterator[tuple[Tensor, int]]:
    yield named["self"], named["num_classes"]


def _check_index_reduce(func: OpOverload, named: Named) -> None:
    found = named["reduce"], named["dim"], named.get("include_self", True)
    if found != ("amax", 0, True):
        text = f"reduce={found[0]!r}, dim={found[1]}, include_self={found[2]}; only 'amax', 0, True exist"
        _fall_back(19, func, text)


def _check_sort(func: OpOverload, named: Named) -> None:
    tensor, dim = named["self"], named.get("dim", -1)
    size = tensor.shape[dim] if tensor.dim() else 1
    if named.get("stable") and (dim in (0, -tensor.dim()) or size > MOST_STABLE):
        _fall_back(20, func, f"a stable sort of {size} elements on dim {dim} of {tensor.dim()}; use stable=False")


def _fall_back(duty: int, func: OpOverload, finding: str) -> None:
    if duties.on(duty):
        card.fallbacks[func._schema.name] += 1
        duties.warn(duty, func, f"cpu fallback: {finding}")


_INDICES: dict[str, Callable[[Named], Iterator[tuple[Tensor, int]]]] = {
    **dict.fromkeys(_INDEXED_ALONG_DIM, _along_dim),
    **dict.fromkeys(_INDEXED_BY_LIST, _by_list),
    **dict.fromkeys(("embedding",), _by_row),
    **dict.fromkeys(("take", "put", "put_"), _flat),
    "one_hot": _classes,
}
_FALLBACKS: dict[str, Callable[[OpOverload, Named], None]] = {
    **dict.fromkeys(("index_reduce", "index_reduce_"), _check_index_reduce),
    **dict.fromkeys(("sort", "argsort"), _check_sort),
}
