"""What graphs and their activations take of a device, measured before the KV cache takes the rest."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.graphs.graph_runner.factory import runner_maker
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.warm_up.memory_fit import check_budget
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.memory.kv_cache import dummy_kv_cache
from vllm_gaudi_ucm.runner.attention_layers import bind_kv_caches, kv_cache_specs
from vllm_gaudi_ucm.runner.bucket_choice import cost_model, server_limits
from vllm_gaudi_ucm.runner.static_execution import StaticExecution

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.graphs.warm_up.graph_key import GraphKey
    from vllm_gaudi_ucm.runner.decoder import Decoder
    from vllm_gaudi_ucm.runner.graph_kind import GraphKind

GIB = 1 << 30
# Where `ucm.graphs.memory_budget` is not given: this share of the device, or what the largest graphs take and as much
# again for the others, where that is more.
DEFAULT_SHARE = 0.1
DEFAULT_FACTOR = 2.0


def graph_memory_budget(
    decoder: Decoder, vllm_config: VllmConfig, config: UcmConfig, device: Device, kind: GraphKind
) -> int:
    """Bytes that graphs may take, from the largest graphs of prompts, of decodes and of logits, which are really run.

    Raises:
        MemoryBudgetError: `ucm.graphs.memory_budget` does not hold these.
    """
    measured = _measure(decoder, vllm_config, config, device, kind)
    given = config.graphs.memory_budget
    if given is None:
        return int(max(DEFAULT_SHARE * device.memory().total, DEFAULT_FACTOR * sum(measured.values())))
    budget = int(given * GIB)
    check_budget(measured, budget, vllm_config.scheduler_config.max_num_batched_tokens)
    return budget


@torch.inference_mode()
def _measure(
    decoder: Decoder, vllm_config: VllmConfig, config: UcmConfig, device: Device, kind: GraphKind
) -> dict[GraphKey, int]:
    """Bytes by graph, the configured maximum first.

    The number of blocks is not known yet: as many as would fill the free memory are assumed. Pads read the dummy block
    alone, so a cache of one block is enough, and blocks are gathered, which takes at least what a slice does.
    """
    specs = kv_cache_specs(vllm_config)
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    block_size = next(iter(specs.values())).block_size
    num_blocks = max(2, device.memory().free // block_bytes)
    limits = server_limits(vllm_config, block_size, num_blocks, False, config.graphs.max_shared_blocks)
    decodes = limits.phase_maximum(causal=False, shared=True, unique=True)
    buckets = BucketSet([decodes], [], limits, cost_model(vllm_config, device, block_size))
    tensors_on = device.torch_device()
    bind_kv_caches(vllm_config, dummy_kv_cache(specs, tensors_on))
    execution = StaticExecution(
        decoder,
        ReadyBuckets(buckets),
        config.attention.causal_slice,
        tensors_on,
        runner_maker(kind),
        lambda label: nullcontext(),
    )
    measured: dict[GraphKey, int] = {}
    for shape in dict.fromkeys((limits.maximum.forward, decodes)):
        free = device.memory().free
        execution.warm_forward(shape)
        device.synchronize()
        measured[shape] = max(0, free - device.memory().free)
    free = device.memory().free
    execution.warm_logits(limits.maximum.logits)
    device.synchronize()
    measured[limits.maximum.logits] = max(0, free - device.memory().free)
    bind_kv_caches(vllm_config, {name: torch.empty(0, device=tensors_on) for name in specs})
    del execution
    gc.collect()
    device.empty_cache()
    return measured
