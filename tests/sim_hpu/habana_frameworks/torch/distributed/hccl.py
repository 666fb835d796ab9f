"""Process group backend `hccl`: gloo, because the tensors are the host's in truth."""

from datetime import timedelta
from typing import Any

from habana_frameworks.torch.simulator.collectives import watch_reductions

import torch.distributed as dist


def register_hccl() -> None:
    """Makes the backend known to torch.distributed; the bridge does it when it is imported."""
    if dist.is_available() and not dist.is_backend_available("hccl"):
        watch_reductions()
        dist.Backend.register_backend("hccl", _gloo, devices=["cpu", "hpu"])


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
