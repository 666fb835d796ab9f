"""The index -1 as a pad, as vllm-gaudi relies on it without a document that says so. Off unless asked for."""

from typing import Any

from habana_frameworks.torch.simulator.rules import Named, may_be_minus_one

import torch
from torch._ops import OpOverload


def run_with_pads(func: OpOverload, named: Named) -> Any:
    """A pad selects zeros and writes nothing. NotImplemented where there is no -1, or none is allowed."""
    if not may_be_minus_one(func) or "index" not in named:
        return NotImplemented
    index, dim = named["index"], named["dim"]
    kept = index >= 0
    if bool(kept.all()):
        return NotImplemented
    if func._schema.name == "aten::index_select":
        shape = [1] * named["self"].dim()
        shape[dim] = -1
        found = torch.index_select(named["self"], dim, index.clamp(min=0))
        return found * kept.view(shape).to(found.dtype)
    return func(named["self"], dim, index[kept], named["source"].index_select(dim, kept.nonzero().flatten()))
