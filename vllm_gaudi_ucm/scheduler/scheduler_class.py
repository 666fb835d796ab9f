"""Chooses the scheduler class that vLLM makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig

logger = plugin_logger(__name__)

_OURS = "vllm_gaudi_ucm.scheduler.scheduler"


def need_our_scheduler(vllm_config: VllmConfig, option: str) -> None:
    """Sets `scheduler_cls` for an option. Raises UnsupportedFeatureError if the user set another class."""
    if not _use_ours(vllm_config):
        raise UnsupportedFeatureError(f"{option} with a scheduler of your own", "--scheduler-cls")


def use_planning_scheduler(vllm_config: VllmConfig) -> None:
    """Sets `scheduler_cls` for our connector. A user's scheduler stays: blocks then load at a request's turn."""
    if not _use_ours(vllm_config):
        logger.warning("--scheduler-cls is not ours, so that nothing is prefetched for requests that wait.")


def warms_by_order(vllm_config: VllmConfig, config: UcmConfig) -> bool:
    """Returns whether the scheduler decides when graphs are warmed: several workers do it together.

    Workers without graphs report that nothing is left to do. Engines that share out experts warm everything before they
    serve, because they are idle at different times.
    """
    graphs = config.graphs
    if shares_experts(vllm_config):
        return False
    return vllm_config.parallel_config.world_size > 1 and graphs.warm_up == "idle" and graphs.mode != "off"


def shares_experts(vllm_config: VllmConfig) -> bool:
    """Returns whether engines compute each step together, because each has a part of the model's experts."""
    model = vllm_config.model_config
    return vllm_config.parallel_config.data_parallel_size > 1 and model is not None and model.is_moe


def is_foreign(scheduler: SchedulerConfig) -> bool:
    """Returns whether the user has set a scheduler class. Our class is set if a configuration comes a second time."""
    return scheduler.scheduler_cls is not None and not str(scheduler.scheduler_cls).startswith(f"{_OURS}.")


def _use_ours(vllm_config: VllmConfig) -> bool:
    """Returns whether our class could be set, or was set before."""
    scheduler = vllm_config.scheduler_config
    ours = f"{_OURS}.{'UcmAsyncScheduler' if scheduler.async_scheduling else 'UcmScheduler'}"
    if scheduler.scheduler_cls not in (None, ours):
        return False
    scheduler.scheduler_cls = ours
    return True
