"""Copies between the regions of a device and their buffers on the host, which vLLM's NIXL worker orders."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.connector.nixl_connector import copy_regions
from vllm_gaudi_ucm.device import get_device


def test_copied_blocks_and_no_others() -> None:
    rows = torch.arange(5 * 4 * 2 * 3, dtype=torch.float32).view(5, 4, 2, 3)
    device = {"layer.key": rows.transpose(1, 2), "layer.value": (rows + 1000).transpose(1, 2)}
    # vLLM's buffers: rows of tokens, viewed with the heads first
    host = {name: torch.full((5, 4, 2, 3), -1.0).transpose(1, 2) for name in device}
    copy_regions(get_device("cpu"), device, host, [1, 3], [2, 4], "d2h")
    for name, region in host.items():
        assert torch.equal(region[2], device[name][1])
        assert torch.equal(region[4], device[name][3])
        assert bool((region[[0, 1, 3]] == -1).all())
