"""vLLM's worker interface."""

from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.tasks import SupportedTask
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

__all__ = [
    "CompilationTimes",
    "InputBatch",
    "SupportedTask",
    "WorkerBase",
    "ensure_model_parallel_initialized",
    "init_distributed_environment",
    "set_random_seed",
]
