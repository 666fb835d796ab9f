"""Doctor's section on preemption: the link to host memory, measured with blocks of a usual size."""

from collections.abc import Iterator

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.config.ucm_config import UcmConfig

SECTION = "preemption"
# 16 MiB: 128 tokens of a model with 8 billion parameters
LAYERS, BLOCK = 32, (128, 8, 128)
BLOCKS = 4


def preemption_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """Yields a row for the link, and one for rates that only a server measures. This starts a card, as serving does."""
    if device is None:
        return
    # torch takes seconds, which the help of the command need not
    import torch

    from vllm_gaudi_ucm.device import get_device
    from vllm_gaudi_ucm.memory.swap_space import SwapSpace

    mode = config.preemption.mode
    yield Check(SECTION, "ucm.preemption.mode", "info", mode)
    found = get_device(device)
    on = found.torch_device()
    caches = [torch.zeros((BLOCKS, *BLOCK), dtype=torch.bfloat16, device=on) for _ in range(2 * LAYERS)]
    space = SwapSpace([caches], found, BLOCKS)
    try:
        speed = space.measure()
    finally:
        space.close()
    to, back = speed.to_host * 1e-9, speed.from_host * 1e-9
    yield Check(SECTION, "link to host memory", "info", f"{to:.1f} GB/s to the host, {back:.1f} GB/s back")
    yield Check(
        SECTION,
        "rate of prompts",
        "info",
        "known while a server runs: gaudi_ucm_memory_rates, with ucm.preemption.mode swap or auto",
    )
