"""What vLLM's own managers read of, and call on, the object that has a layer's adapters."""

from __future__ import annotations

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping

from vllm_gaudi_ucm.lora.layer_adapters import LayerAdapters


def test_vllms_managers_find_the_device_and_may_set_a_mapping() -> None:
    device = torch.device("cpu")
    adapters = LayerAdapters(8, 2, device, lora_config=LoRAConfig(max_loras=2, max_lora_rank=8))
    assert adapters.device == device
    before = dict(vars(adapters))
    adapters.update_metadata(LoRAMapping((1, 2), (1, 2)), [1, 2], 2, 128)
    assert vars(adapters) == before, "a mapping of vLLM's has no effect: the rows' adapters are a row input"
