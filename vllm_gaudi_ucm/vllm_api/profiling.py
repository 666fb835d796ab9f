"""Profilers: `vllm.profiler`.

Internal: the wrappers of `vllm.profiler.wrapper`, which vLLM's own workers start and stop, and the suffix of a rank in
the name of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.profiler import validate_profile_prefix
from vllm.distributed.utils import get_worker_rank_suffix
from vllm.profiler.wrapper import CudaProfilerWrapper, TorchProfilerWrapper

from vllm_gaudi_ucm.vllm_api.platforms import PROFILER_ACTIVITIES

if TYPE_CHECKING:
    from vllm.config import ProfilerConfig

__all__ = ["CudaProfiler", "TorchProfiler", "make_worker_profiler", "trace_name"]


class TorchProfiler(TorchProfilerWrapper):
    """vLLM's profiler of torch, which also records the threads that end steps and a Gaudi's activity.

    Reason: vLLM's table of activities has no HPU, and its profiler records only the thread that started it.
    Remove when: `TorchProfilerActivityMap` has HPU, and the wrapper records all threads.
    """

    with_hpu = False
    _of_session: Mapping[str, Any] = MappingProxyType({})

    def _start(self) -> None:
        from torch._C._profiler import _ExperimentalConfig

        added: dict[str, Any] = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
        if self.with_hpu:
            added["activities"] = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.HPU]
        # the arguments of a session come last
        self._profiler_kwargs = {**self._profiler_kwargs, **added, **self._of_session}
        super()._start()

    def begin_session(self, arguments: dict[str, Any] | None, **bounds: int | None) -> None:
        """Starts the profiler. arguments: of `torch.profiler.profile`. bounds: of vLLM's `start`."""
        if not self._active:
            self._of_session = dict(arguments or {})
        self.start(**bounds)


class HpuProfiler(TorchProfiler):
    """A profiler that records a Gaudi, too."""

    with_hpu = True


class CudaProfiler(CudaProfilerWrapper):
    """vLLM's profiler that starts and stops the range of Nsight Systems, with the sessions of `TorchProfiler`."""

    def begin_session(self, arguments: dict[str, Any] | None, **bounds: int | None) -> None:
        """Starts the range, unless it is active. arguments: for torch's profiler alone."""
        self.start(**bounds)


def trace_name(rank: int, prefix: str | None) -> str:
    """Returns the name of a worker's trace.

    Reason: vLLM's workers make the name themselves, each where it needs it. Raises ValueError for a prefix that is no
    file name.
    Remove when: `create_worker_profiler` takes a prefix on every supported version.
    """
    suffix: str = get_worker_rank_suffix(global_rank=rank)
    return f"{validate_profile_prefix(prefix)}_{suffix}" if prefix else suffix


def make_worker_profiler(
    config: ProfilerConfig, device_kind: str, name: str, local_rank: int
) -> TorchProfiler | CudaProfiler:
    """Makes a profiler, which does not run yet.

    Reason: vLLM chooses the activities of a device by its own platforms, which have no Gaudi.
    Remove when: its table of activities has HPU.

    config: with a kind that the device has.
    """
    if config.profiler == "cuda":
        return CudaProfiler(config)
    asked = config.torch_profiler_activities
    cls = HpuProfiler if device_kind == "hpu" and asked is None else TorchProfiler
    activities: Sequence[Any] = PROFILER_ACTIVITIES[device_kind] if asked is None else tuple(asked)
    return cls(config, worker_name=name, local_rank=local_rank, activities=activities)
