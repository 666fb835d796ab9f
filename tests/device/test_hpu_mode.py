"""Gaudi's execution mode: what the environment asks for, and what the installed torch can do."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.machine import hpu_mode_check
from vllm_gaudi_ucm.device.hpu_mode import HpuMode, check_hpu_mode

VENDORS, UPSTREAM = "2.11.0a0+git5d0b3a1", "2.11.0+cpu"


@pytest.mark.parametrize(("value", "lazy"), [(None, False), ("", False), ("0", False), ("1", True), ("2", True)])
def test_lazy_mode_is_asked_for(monkeypatch: pytest.MonkeyPatch, value: str | None, lazy: bool) -> None:
    """Unset means eager with torch.compile: the bridge's default."""
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", value)
    assert envs.lazy_mode() == lazy


@pytest.mark.parametrize(
    ("lazy", "version", "status"),
    [(False, VENDORS, "ok"), (False, UPSTREAM, "ok"), (True, VENDORS, "warn"), (True, UPSTREAM, "fail")],
)
def test_the_doctor_names_mode_and_flavour(lazy: bool, version: str, status: str) -> None:
    check = hpu_mode_check(HpuMode(lazy, version))
    assert check.status == status
    assert version in check.found
    assert ("lazy" in check.found) == lazy
    assert ("torch.compile" in check.found) == (status != "warn" or "nothing is compiled" in check.found)
    assert ("HPU graphs" in check.found) == (status != "fail")


def test_lazy_mode_on_upstreams_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", UPSTREAM)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    with pytest.raises(RuntimeError, match=r"PT_HPU_LAZY_MODE=1: lazy mode needs the vendor's .* unset PT_HPU_LAZY"):
        check_hpu_mode()
    monkeypatch.setattr("torch.__version__", VENDORS)
    check_hpu_mode()
