"""The gate between an expert's two products, by torch's operators: shared by the implementations without a kernel."""

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.moe.spec import MoeSpec


def gate(both: Tensor, spec: MoeSpec) -> Tensor:
    """[..., inner] of the first product [..., 2 * inner], in its dtype; half precision is computed in float32."""
    dtype = both.dtype
    wide = both.float() if dtype.itemsize < 4 else both
    gates, up = (wide[..., ::2], wide[..., 1::2]) if spec.interleaved else wide.chunk(2, -1)
    if spec.limit is not None:
        gates, up = gates.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    if spec.beta:
        up = up + spec.beta
    if spec.form != "silu":
        passed = functional.gelu(gates, approximate="tanh" if spec.form == "gelu_tanh" else "none")
    elif spec.alpha == 1.0:
        passed = functional.silu(gates)
    else:
        passed = gates * torch.sigmoid(spec.alpha * gates)
    return (passed * up).to(dtype)
