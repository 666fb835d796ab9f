"""Workers: `vllm.v1.worker`.

Extension point: `WorkerBase` is the base class of a platform plugin's worker; `CompilationTimes` and `SupportedTask`
are types of its methods.
Internal: `InputBatch`, which custom logits processors are made from; `set_random_seed`, by which vLLM's own workers
prepare a device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.tasks import SupportedTask
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

__all__ = [
    "CompilationTimes",
    "InputBatch",
    "SupportedTask",
    "WorkerBase",
    "answer_of_all",
    "model_loading",
    "refused_by_last",
    "set_random_seed",
]


def answer_of_all(act: Callable[[], bool], is_last: bool) -> bool:
    """Returns the result of a call that every worker answers. If it fails on all of them, the last one raises, and the
    others return False.

    Reason: an executor of several workers stops reading answers at the first error. The answers of later workers
    stay in their queues, and are taken for answers to the next call.
    Remove when: `MultiprocExecutor.collective_rpc` reads every answer before it raises.
    """
    try:
        return act()
    except Exception:
        if is_last:
            raise
        return False


def refused_by_last(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a worker whose refusals, which all workers of an engine come to, are raised by the last one alone.

    Reason: that of `answer_of_all`.
    Remove when: that of `answer_of_all`.
    """

    @wraps(method)
    def call(worker: WorkerBase, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(worker, *args, **kwargs)
        except NotImplementedError:
            if worker.rank == worker.parallel_config.world_size - 1:
                raise
            return None

    return call


def model_loading(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """The context in which a worker loads its model.

    Reason: `WorkerWrapperBase` sets the current configuration around `init_device` and `initialize_from_config`, but
    not around `load_model`, where the layers of a model read it.
    Remove when: `WorkerWrapperBase.load_model` exists and sets it.
    """
    return set_current_vllm_config(vllm_config)
