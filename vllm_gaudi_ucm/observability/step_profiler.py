"""Starts and stops vLLM's profiler in a worker, and names the phases of a step in its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.profiling import make_worker_profiler, trace_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import ProfilerConfig

    from vllm_gaudi_ucm.vllm_api.profiling import CudaProfiler, TorchProfiler

logger = plugin_logger(__name__)


class StepProfiler:
    """The profiler of a worker. It is made at the first start, so that an engine that is never profiled has none.

    Args:
        config: vLLM's, with a profiler that the device has.
        device_kind: kind of the worker's device.
        rank: the worker's rank among all workers of the engine, which is part of a trace's name.
        local_rank: its rank on this machine; rank 0 also prints a table.
    """

    def __init__(self, config: ProfilerConfig, device_kind: str, rank: int, local_rank: int) -> None:
        self._config = config
        self._device_kind = device_kind
        self._rank = rank
        self._local_rank = local_rank
        self._profiler: TorchProfiler | CudaProfiler | None = None
        self._phase: AbstractContextManager[Any] | None = None

    def start(self, prefix: str | None, kwargs: dict[str, Any] | None, **bounds: int | None) -> None:
        """Starts a session, unless one is active.

        Args:
            prefix: first part of the trace's name.
            kwargs: arguments of `torch.profiler.profile` for this session.
            bounds: `delay_iterations` and `max_iterations` for this session; None: the configuration's.

        Raises ValueError for a prefix that is no file name, and for negative bounds.
        """
        name = trace_name(self._rank, prefix)
        if self._profiler is None:
            self._profiler = make_worker_profiler(self._config, self._device_kind, name, self._local_rank)
        self._profiler.set_output_name(name)
        self._profiler.begin_session(kwargs, **bounds)

    def stop(self) -> None:
        """Ends the session and writes its trace."""
        self.end_phase()
        if self._profiler is None:
            logger.warning("No profile to stop: none was started.")
        else:
            self._profiler.stop()

    def begin_step(self) -> None:
        """Counts a step, after which a session may begin or end."""
        self.end_phase()
        if self._profiler is not None:
            self._profiler.step()

    @property
    def is_recording(self) -> bool:
        """Returns whether the names of phases are recorded."""
        return self._profiler is not None and self._profiler.should_annotate

    def begin_phase(self, name: str) -> None:
        """Ends the phase before, and begins the next one. Both must be in one thread."""
        self.end_phase()
        if self._profiler is not None:
            self._phase = self._profiler.annotate_context_manager(name)
            self._phase.__enter__()

    def end_phase(self) -> None:
        """Ends the phase, if there is one."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def close(self) -> None:
        """Ends a session that is still active, and writes its trace."""
        self.end_phase()
        if self._profiler is not None:
            self._profiler.shutdown()
