"""Which platform vLLM would take without this plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.vllm_api.platforms import (
    tolerate_missing_accelerator,
    uses_older_ray_executor,
    vllm_own_platforms,
)


def test_own_platforms_follow_vllms_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in plugin that raises counts as not active, as in vLLM itself."""
    import vllm.platforms

    def broken() -> str:
        raise OSError("driver")

    plugins = {"cuda": lambda: "C", "rocm": lambda: None, "xpu": broken, "cpu": lambda: "P"}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    assert vllm_own_platforms() == ["cuda", "cpu"]


ALLOCATOR = ("empty_cache", "empty_host_cache", "get_memory_info")


def _without_allocator(*_: Any, **__: Any) -> None:
    raise RuntimeError("Allocator for hpu is not a DeviceAllocator")


@pytest.fixture
def gaudis_accelerator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`torch.accelerator` as Gaudi's bridge 1.24.1 leaves it; calls of the bridge are noted."""
    calls: list[str] = []

    def memory() -> tuple[int, int]:
        calls.append("mem_get_info")
        return 3, 4

    bridge = SimpleNamespace(synchronize=lambda: calls.append("synchronize"), mem_get_info=memory)
    monkeypatch.setattr(torch, "hpu", bridge, raising=False)
    for name in (*ALLOCATOR, "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, _without_allocator, raising=False)
    return calls


def test_a_model_loads_where_the_allocator_is_none_of_torchs(gaudis_accelerator: list[str]) -> None:
    """The calls of vLLM's loader and of its clean-up, as it makes them."""
    with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
        torch.accelerator.empty_cache()
    tolerate_missing_accelerator("hpu")
    assert gaudis_accelerator == []  # nothing starts a card
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()
    torch.accelerator.synchronize()
    assert torch.accelerator.get_memory_info() == (3, 4)
    assert gaudis_accelerator == ["synchronize", "mem_get_info"]


def test_an_accelerator_of_torchs_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    before = torch.accelerator.empty_cache
    tolerate_missing_accelerator("cuda")
    assert torch.accelerator.empty_cache is before


@pytest.mark.parametrize("use_ray", [True, False])
def test_the_older_executor_on_ray(monkeypatch: pytest.MonkeyPatch, use_ray: bool) -> None:
    """By vLLM 0.32's variable; where vLLM has no such variable it has no such executor."""
    import vllm.envs

    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(use_ray=use_ray))
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    vllm.envs.disable_envs_cache()
    for is_newer in (True, False):
        monkeypatch.setitem(vllm.envs.environment_variables, name, lambda: is_newer)  # noqa: B023
        assert uses_older_ray_executor(config) is (use_ray and not is_newer)
    monkeypatch.delitem(vllm.envs.environment_variables, name)
    assert uses_older_ray_executor(config) is False
