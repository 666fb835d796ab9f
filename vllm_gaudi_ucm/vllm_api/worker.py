"""Workers: `vllm.v1.worker`.

Extension point: `WorkerBase` is the base class of a platform plugin's worker; `CompilationTimes` and `SupportedTask`
are types of its methods.
Internal: `InputBatch`, which custom logits processors are made from; `set_random_seed`, by which vLLM's own workers
prepare a device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

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
    "model_loading",
    "raised_by_last",
    "set_random_seed",
]

Method = TypeVar("Method", bound=Callable[..., Any])


def raised_by_last(kind: type[Exception], otherwise: object = None) -> Callable[[Method], Method]:
    """Decorates a method of a worker that every worker of an engine runs with the same result: if it raises an error of
    this kind, the last worker alone raises it, and the others return `otherwise`.

    Reason: an executor of several workers stops reading answers at the first error. The answers of later workers
    stay in their queues, and are taken for answers to the next call.
    Remove when: `MultiprocExecutor.collective_rpc` reads every answer before it raises.
    """

    def decorated(method: Method) -> Method:
        @wraps(method)
        def call(worker: WorkerBase, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(worker, *args, **kwargs)
            except kind:
                if worker.rank == worker.parallel_config.world_size - 1:
                    raise
                return otherwise

        return cast(Method, call)

    return decorated


def model_loading(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """The context in which a worker loads its model.

    Reason: `WorkerWrapperBase` sets the current configuration around `init_device` and `initialize_from_config`, but
    not around `load_model`, where the layers of a model read it.
    Remove when: `WorkerWrapperBase.load_model` exists and sets it.
    """
    return set_current_vllm_config(vllm_config)
