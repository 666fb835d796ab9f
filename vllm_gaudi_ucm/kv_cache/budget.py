"""How many bytes the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device.base import Device

logger = plugin_logger(__name__)

GIB = 1 << 30
# A CPU's memory belongs to everybody on the machine: take what a demo or a test needs, and more only when asked.
CPU_DEFAULT = 4 * GIB


def kv_cache_budget(device: Device, vllm_config: VllmConfig, measure_steps: Callable[[], int]) -> int:
    """Bytes for the KV cache: `--kv-cache-memory-bytes` as given, else what the device has left.

    On an accelerator the memory that steps take beside the cache is taken off (`--gpu-memory-utilization` bounds the
    whole). On a CPU the default is 4 GiB or half of the free memory.

    measure_steps: runs the largest steps and returns the bytes to keep for them.
    """
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    free, total = device.memory()
    if explicit is not None:
        if explicit > free:
            raise ValueError(
                f"--kv-cache-memory-bytes {explicit}: only {free} bytes are free on {device.name()}; "
                f"give at most that, or free some memory"
            )
        return explicit
    if device.kind == "cpu":
        budget = min(CPU_DEFAULT, free // 2)
    else:
        kept = measure_steps()
        budget = free - kept - int(total * (1 - vllm_config.cache_config.gpu_memory_utilization))
        logger.info("%.2f GiB are kept for steps and their graphs", kept / GIB)
    logger.info("KV cache: %.2f GiB of %.2f GiB free on %s", budget / GIB, free / GIB, device.name())
    return max(budget, 0)
