"""The doctor's rows on preemption."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_gaudi_ucm.cli.doctor import preemption
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_value


def test_the_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LAYERS", 2)
    mode, link, rate = preemption.preemption_checks(resolve_value({"preemption": {"mode": "auto"}}), "cpu")
    assert (mode.name, mode.found) == ("ucm.preemption.mode", "auto")
    assert link.found.endswith("GB/s back")
    assert float(link.found.split()[0]) > 0
    assert "gaudi_ucm_memory_rates" in rate.found


def test_without_a_device() -> None:
    assert list(preemption.preemption_checks(UcmConfig(), None)) == []


def test_nothing_of_vllm_is_imported() -> None:
    """It loads every plugin of the machine, and one of them may end the process."""
    code = (
        "import sys; from vllm_gaudi_ucm.cli.doctor.preemption import *; "
        "list(preemption_checks(UcmConfig(), 'cpu')); assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
