"""Stand-in for Gaudi's PyTorch bridge where there is no Gaudi: importing it registers `torch.hpu`, as that does.

Put `tests/sim_hpu` on PYTHONPATH of a process of its own: importing changes torch for good. Tensors on "hpu" live on
the CPU in truth, but say that they are on the card; operators on them are checked, counted and captured as on a Gaudi.
What was called, and the figures that calls return, are in `habana_frameworks.torch.simulator`.
"""

from habana_frameworks.torch import core, hpu
from habana_frameworks.torch.distributed.hccl import register_hccl
from habana_frameworks.torch.dynamo.backend import register_compiler
from habana_frameworks.torch.simulator.generator import CardGenerator
from habana_frameworks.torch.simulator.kernels import define_kernels
from habana_frameworks.torch.simulator.process import enter_modes, enter_modes_in_threads, forbid_fork

import torch

__all__ = ["core", "hpu"]

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
    torch.Generator = CardGenerator  # type: ignore[misc]
    define_kernels()
    register_hccl()
    register_compiler()
    forbid_fork()
    enter_modes_in_threads()
    enter_modes()
