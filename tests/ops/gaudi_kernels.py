"""Operators of Gaudi's software on CPU tensors, in this process: importing the simulated card changes torch for good.

Each checks what the card's kernel expects, computes in float32 and rounds once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

RMS_NORM = "rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)"
ROTARY = (
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor"
)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / root mean square in float32."""
    assert x.dim() == 3, f"the kernel takes three dimensions, got {tuple(x.shape)}"
    assert (gamma.dtype, gamma.shape) == (x.dtype, x.shape[-1:])
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * inverse * gamma.float()).to(x.dtype), inverse


def rotary(x: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int) -> Tensor:
    """One float32 argument makes the result float32."""
    assert (position_ids, offset) == (None, 0)
    assert sin.shape[-1] == cos.shape[-1] == x.shape[-1], (sin.shape, cos.shape, x.shape)
    wide = [tensor for tensor in (x, sin, cos) if tensor.dtype == torch.float32]
    dtype = torch.float32 if wide else x.dtype
    x, sin, cos = x.float(), sin.float(), cos.float()
    if mode == 0:
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * cos + turned * sin).to(dtype)


KERNELS: Mapping[str, Callable[..., Any]] = {RMS_NORM: rms_norm, ROTARY: rotary}


@contextmanager
def gaudi_software(kernels: Mapping[str, Callable[..., Any]] = KERNELS, **wrappers: object) -> Iterator[None]:
    """While it is entered, a bridge can be imported, with these operators (by schema) and wrappers in hpex.kernels."""
    library = torch.library.Library("hpu", "FRAGMENT")
    for schema, kernel in kernels.items():
        name = library.define(schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hpu::{name}", kernel, lib=library)
    modules = {name: ModuleType(name) for name in _MODULES}
    vars(modules["habana_frameworks.torch.hpex.kernels"]).update(wrappers)
    try:
        with patch.dict(sys.modules, modules):
            yield
    finally:
        library._destroy()


_MODULES = (
    "habana_frameworks",
    "habana_frameworks.torch",
    "habana_frameworks.torch.hpex",
    "habana_frameworks.torch.hpex.kernels",
)
