"""The mode in which Gaudi's bridge compiles and does not execute, over a bridge whose own context forgets to end it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.device import get_device

FLAG = "PT_COMPILE_ONLY_MODE"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a stand-in for the bridge; a flag that is none of its keys is not settable."""
    found: dict[str, Any] = {FLAG: False}

    @contextmanager
    def env_setting(name: str, value: Any) -> Iterator[None]:
        before, found[name] = found[name], value
        yield  # no `finally`, as in the bridge
        found[name] = before

    names = ["habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.internal"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    settings = ModuleType(f"{names[-1]}.bridge_config")
    settings.env_setting = env_setting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(), raising=False)
    return found


def test_it_ends_with_the_block(flags: dict[str, Any]) -> None:
    with get_device("hpu").compile_only() as is_garbage:
        assert is_garbage
        assert flags[FLAG] is True
    assert flags[FLAG] is False


def test_it_ends_with_an_error(flags: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="broken"), get_device("hpu").compile_only():
        raise ValueError("broken")
    assert flags[FLAG] is False


def test_a_bridge_without_it_executes(flags: dict[str, Any]) -> None:
    del flags[FLAG]
    with get_device("hpu").compile_only() as is_garbage:
        assert not is_garbage
    with pytest.raises(KeyError, match="other"), get_device("hpu").compile_only():
        raise KeyError("other")


def test_a_cpu_executes() -> None:
    with get_device("cpu").compile_only() as is_garbage:
        assert not is_garbage


def test_lazy_mode_executes(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There captured graphs are measured while they are captured."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    with get_device("hpu").compile_only() as is_garbage:
        assert not is_garbage
        assert flags[FLAG] is False
