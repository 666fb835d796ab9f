"""An engine of vLLM in this process, whose model a tool can observe."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_gaudi_ucm.start.model_runner import ModelRunner
    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs


class ObservedEngine:
    """vLLM's engine with our platform; a context manager, because only one lives at a time.

    Args:
        model: for errors.
        make_args: called when an error of vLLM becomes one that names the model.
    """

    def __init__(self, model: Path, make_args: Callable[[], EngineArgs]) -> None:
        """Raises ValueError if the engine does not start with this model."""
        from vllm_gaudi_ucm.vllm_api.engine import Executor, LLMEngine

        try:
            self.vllm_config = make_args().create_engine_config()
            executor = Executor.get_class(self.vllm_config)
            self._engine: Any = LLMEngine(self.vllm_config, executor, log_stats=False, multiprocess_mode=False)
        except RuntimeError as error:
            raise ValueError(f"MODEL: the engine did not start with {model} ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the engine and vLLM's process groups, so that the next one can start."""
        self._engine.engine_core.shutdown()
        del self._engine
        # model and cache are parts of cycles
        gc.collect()

    @property
    def runner(self) -> ModelRunner:
        return cast("ModelRunner", self._engine.model_executor.driver_worker.worker.model_runner)
