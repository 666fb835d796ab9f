"""Registers the kernels that torch does not have, as operators of the namespace `hpu` with the bridge's schemas."""

from habana_frameworks.torch.simulator import (
    attention_kernels,
    expert_kernels,
    fp8_kernels,
    norm_kernels,
    softmax_kernels,
    uint4_kernels,
)
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.kernel import Kernel

import torch

_ALL: tuple[Kernel, ...] = (
    *attention_kernels.KERNELS,
    *expert_kernels.KERNELS,
    *fp8_kernels.KERNELS,
    *norm_kernels.KERNELS,
    *softmax_kernels.KERNELS,
    *uint4_kernels.KERNELS,
)
_library = torch.library.Library("hpu", "DEF")


def define_kernels() -> None:
    """Registers the operators that this build of the software has; once per process."""
    for kernel in _ALL:
        if card.has_build(kernel.since):
            _library.define(kernel.schema)
            _library.impl(kernel.name, kernel.run, "CompositeExplicitAutograd")
            _library._register_fake(kernel.name, kernel.shape or kernel.run)
