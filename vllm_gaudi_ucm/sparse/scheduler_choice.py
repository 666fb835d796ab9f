"""Puts our scheduler class, which has the scheduler role of the sparse method beside it, in the place of vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.features import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OURS = "vllm_gaudi_ucm.sparse.scheduler"


def use_sparse_scheduler(vllm_config: VllmConfig) -> None:
    """Sets `scheduler_cls`, vLLM's extension point. Raises UnsupportedFeatureError where the user set another one."""
    scheduler = vllm_config.scheduler_config
    name = "UcmAsyncScheduler" if scheduler.async_scheduling else "UcmScheduler"
    ours = f"{_OURS}.{name}"
    if scheduler.scheduler_cls not in (None, ours):
        raise UnsupportedFeatureError("ucm.ucm_sparse_method with a scheduler of your own", "--scheduler-cls")
    scheduler.scheduler_cls = ours
