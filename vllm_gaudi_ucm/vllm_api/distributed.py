"""Groups of workers: `vllm.distributed`.

Extension point: `DeviceCommunicatorBase` is the base class of a platform plugin's communicator
(`Platform.get_device_communicator_cls`).
Internal: `init_distributed_environment`, `ensure_model_parallel_initialized`, `model_parallel_is_initialized` and
`destroy_model_parallel`, by which vLLM's own workers make their groups (`GroupCoordinator`); `get_world_group`, which
has all workers of an engine, `get_tp_group`, which has those that share out a layer, and `get_pp_group`, which has a
worker of each stage of a pipeline; `get_dp_group`, which has the workers of the same rank in the engines that share
out experts; `tensor_model_parallel_all_reduce`, the sum over the ranks that share out a layer's
heads, as row-parallel layers call it; `get_pp_indices`, which layers a stage has; `IntermediateTensors`, in which vLLM
models take and return the tensors between stages.
"""

from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    model_parallel_is_initialized,
    parallel_state,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.sequence import IntermediateTensors

__all__ = [
    "DeviceCommunicatorBase",
    "GroupCoordinator",
    "IntermediateTensors",
    "get_dp_group",
    "get_pp_group",
    "get_pp_indices",
    "get_tp_group",
    "get_world_group",
    "init_distributed_environment",
    "make_model_groups",
    "symmetric_memory_is_wanted",
    "tensor_model_parallel_all_reduce",
    "visible_device",
]


def visible_device(parallel: ParallelConfig, local_rank: int) -> int:
    """Returns which of this process's visible devices belongs to a worker.

    Reason: vLLM gives each of several engines on a machine (and Ray each worker) devices of its own, by ids that the
    worker has to look up; its GPU worker does so in `init_device`. Without such ids the devices are counted.
    Remove when: `WorkerBase` is told its device.
    """
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is None or current_platform.device_type != "cuda":
        # a process on Gaudi has its card from its environment, and a CPU has no ids
        return local_rank
    if local_rank >= len(assigned):
        raise ValueError(
            f"worker {local_rank + 1} of this machine needs a device of its own, its engine was given {assigned}; "
            "name more devices (--device-ids), or lower --tensor-parallel-size or --pipeline-parallel-size"
        )
    set_assigned_physical_gpu_ids(assigned)
    return current_platform.logical_device_id_to_visible_device_id(local_rank)


def make_model_groups(vllm_config: VllmConfig) -> None:
    """The groups of workers that share out a model's layers, stages and experts.

    Reason: vLLM makes the group of experts for a model that has some, in a process that has no groups yet. The engine
    of such a model may be the second one of its process, and each of them the only worker.
    Remove when: `ensure_model_parallel_initialized` makes the group where it is missing.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    lacks_experts = model_parallel_is_initialized() and parallel_state._EP is None
    if lacks_experts and model is not None and model.is_moe and parallel.world_size == 1:
        destroy_model_parallel()
    ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def symmetric_memory_is_wanted() -> bool:
    """Returns whether sums may go through torch's symmetric memory: VLLM_ALLREDUCE_USE_SYMM_MEM, true unless it is 0.

    Reason: the variable switches vLLM's own such sums off, so people who set it expect that here.
    Remove when: sums are configured by a field of `ParallelConfig`.
    """
    return bool(envs.VLLM_ALLREDUCE_USE_SYMM_MEM)
