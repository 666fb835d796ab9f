"""Helpers of `test_cuda_quantised.py` that other tests use, too."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight

GPU = torch.cuda.is_available()


DEVICE = "cuda" if GPU else "cpu"


E4M3 = torch.float8_e4m3fn


def on_device(weight: QuantisedWeight) -> QuantisedWeight:
    moved = (None if part is None else part.to(DEVICE) for part in (weight.codes, weight.scales, weight.zeros))
    codes, scales, zeros = moved
    assert codes is not None
    assert scales is not None
    return QuantisedWeight(codes, scales, weight.block, zeros)
