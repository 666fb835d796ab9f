"""Profilers as vLLM's configuration asks for them, on each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity
from vllm.config import ProfilerConfig

from vllm_gaudi_ucm.vllm_api.profiling import CudaProfiler, make_worker_profiler, trace_name


def config(folder: Path, **options: Any) -> ProfilerConfig:
    return ProfilerConfig(profiler="torch", torch_profiler_dir=str(folder), **options)


@pytest.mark.parametrize(
    ("device", "asked", "activities"),
    [
        ("cpu", None, ["CPU"]),
        ("cuda", None, ["CPU", "CUDA"]),
        ("cuda", ["CUDA"], ["CUDA"]),
        ("hpu", None, ["CPU", "HPU"]),
        ("hpu", ["CPU"], ["CPU"]),
    ],
)
def test_activities(
    device: str, asked: list[Any] | None, activities: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gaudi's are added when a session begins, because vLLM's configuration has no name for them."""
    started: list[dict[str, Any]] = []

    class Profile:
        profiler = None

        def __init__(self, **options: Any) -> None:
            started.append(options)

        def start(self) -> None:
            pass

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    profiler = make_worker_profiler(config(tmp_path, torch_profiler_activities=asked), device, "rank0", 0)
    profiler.begin_session({"with_flops": True})
    assert profiler.is_running
    (options,) = started
    assert options["activities"] == [getattr(ProfilerActivity, name) for name in activities]
    assert options["with_flops"]
    assert options["experimental_config"] is not None


def test_the_profiler_of_nvidia(tmp_path: Path) -> None:
    assert type(make_worker_profiler(ProfilerConfig(profiler="cuda"), "cuda", "rank0", 0)) is CudaProfiler


def test_names_of_traces() -> None:
    assert trace_name(0, "first").startswith("first_")
    assert trace_name(3, None).endswith("rank3")
    for prefix in ("../up", "a b", "x" * 200):
        with pytest.raises(ValueError, match="profile_prefix"):
            trace_name(0, prefix)
