"""Number formats that the card's kernels take and the CPU's do not: 8-bit floats moved by index, f32 sums of bf16."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_COPIES = frozenset({"aten::index_copy", "aten::index_copy_"})
_PRODUCTS = frozenset({"aten::mm", "aten::bmm"})


def run_own_format(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result, NotImplemented where the CPU has a kernel."""
    name = func._schema.name
    if name in _COPIES and args[0].dtype in _EIGHT_BITS:
        target, dim, index, source = args
        moved = func(target.view(torch.uint8), dim, index, source.view(torch.uint8))
        return target if name.endswith("_") else moved.view(target.dtype)
    out = kwargs.get("out")
    if name in _PRODUCTS and isinstance(out, Tensor) and out.dtype == torch.float32 != args[0].dtype:
        return func(*(one.float() for one in args), out=out)
    return NotImplemented
