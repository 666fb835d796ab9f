"""Helpers of `test_compact_weights.py` that other tests use, too."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import GROUP, Form


def four_bits(outputs: int, inputs: int) -> Tensor:
    codes = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP)).double()
    codes[..., 3], codes[..., 7] = 0, 15
    step, low = (torch.rand(2, outputs, inputs // GROUP, 1) + 0.1).half().double()
    return (codes * step - 8 * low).float().reshape(outputs, inputs)


def eight_bits(outputs: int, inputs: int) -> Tensor:
    codes = torch.randint(-127, 128, (outputs, inputs // GROUP, GROUP)).float()
    codes[..., 5] = -127
    return (codes * (torch.rand(outputs, inputs // GROUP, 1) + 0.1).half().float()).reshape(outputs, inputs)


def bfloat16(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).bfloat16().float()


def float16(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).half().float()


MAKERS = {Form.AFFINE4: four_bits, Form.SYMMETRIC8: eight_bits, Form.BFLOAT16: bfloat16, Form.FLOAT16: float16}
