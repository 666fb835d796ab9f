"""Stand-in for Gaudi's PyTorch bridge where there is no Gaudi: importing it registers `torch.hpu`, as that does.

Put `tests/sim_hpu` on PYTHONPATH of a process of its own. Tensors never move: `torch.device("hpu")` exists, but no
storage can be made on it, so code under test keeps its tensors on the CPU and only calls the module's functions. What
was called, and the figures that calls return, are in `habana_frameworks.torch.simulator`, which the bridge lacks.
"""

from habana_frameworks.torch import hpu

import torch

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
