"""Stand-in for Gaudi's PyTorch bridge where there is no Gaudi: importing it registers `torch.hpu`, as that does.

Put `tests/sim_hpu` on PYTHONPATH of a process of its own: `import torch` then imports it, and changes torch for good.
Eager mode with torch.compile is the default; PT_HPU_LAZY_MODE=1 needs SIM_HPU_TORCH_FORK=1 beside it.
Tensors on "hpu" live on the CPU in truth, but say that they are on the card; operators on them are checked, counted and
captured as on a Gaudi, under the rules of `simulator.duties`. What was called, and the figures of it, are in
`habana_frameworks.torch.simulator`.
"""

import os

from habana_frameworks.torch import core, hpu
from habana_frameworks.torch.distributed.hccl import register_hccl
from habana_frameworks.torch.dynamo.backend import register_compiler
from habana_frameworks.torch.simulator.accelerator import refuse_allocator_calls
from habana_frameworks.torch.simulator.environment import watch
from habana_frameworks.torch.simulator.generator import CardGenerator
from habana_frameworks.torch.simulator.kernels import define_kernels
from habana_frameworks.torch.simulator.markers import define_markers
from habana_frameworks.torch.simulator.process import enter_modes, enter_modes_in_threads, forbid_fork
from habana_frameworks.torch.simulator.state import check_flavour

import torch

__all__ = ["core", "hpu"]

check_flavour()
if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
    torch.Generator = CardGenerator  # type: ignore[misc]
    define_kernels()
    define_markers()
    register_hccl()
    register_compiler()
    forbid_fork()
    refuse_allocator_calls()
    watch(dict(os.environ))
    enter_modes_in_threads()
    enter_modes()
