"""Device detection: every branch of the decision, and that deciding starts nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_gaudi_ucm
from tests.sim_path import SIM_PATH
from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.device import detect
from vllm_gaudi_ucm.vllm_api import platforms, versions


class Machine:
    """What detection would see; every fact can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choice, self.software, self.cards, self.cuda = "auto", False, list[str](), False
        self.own, self.vllm = list[str](), "0.32.0"
        monkeypatch.setattr(envs, "device_choice", lambda: self.choice)
        monkeypatch.setattr(detect, "has_gaudi_software", lambda: self.software)
        monkeypatch.setattr(detect, "gaudi_cards", lambda: self.cards)
        monkeypatch.setattr(detect, "has_cuda", lambda: self.cuda)
        monkeypatch.setattr(platforms, "vllm_own_platforms", lambda: self.own)
        monkeypatch.setattr(versions, "installed_version", lambda name: self.vllm)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_auto_takes_hpu_even_where_vllm_has_its_own(machine: Machine) -> None:
    machine.software, machine.cards, machine.own = True, ["accel0", "accel1"], ["cuda"]
    assert detect.decide() == detect.Decision("hpu", "Gaudi software and 2 Gaudi card(s) are present")


@pytest.mark.parametrize(("cuda", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_reference_device_where_vllm_has_none(machine: Machine, cuda: bool, device: str) -> None:
    machine.cuda = cuda
    decision = detect.decide()
    assert decision.device == device
    assert f"vLLM has no platform of its own: {device} as the reference device" in decision.reason


@pytest.mark.parametrize("own", ["cuda", "cpu", "rocm"])
def test_auto_stays_out_of_the_way(machine: Machine, own: str) -> None:
    machine.own, machine.cuda = [own], True
    decision = detect.decide()
    assert decision.device is None
    assert f"vLLM has a platform of its own ({own}); set VLLM_GAUDI_UCM_DEVICE" in decision.reason
    assert vllm_gaudi_ucm.register() is None


@pytest.mark.parametrize(
    ("software", "cards", "missing"),
    [(True, [], "no Gaudi card here"), (False, ["accel0"], "no Gaudi software here")],
)
def test_auto_needs_software_and_card(machine: Machine, software: bool, cards: list[str], missing: str) -> None:
    machine.software, machine.cards = software, cards
    decision = detect.decide()
    assert decision.device == "cpu"
    assert decision.reason.startswith(missing)


def test_auto_without_vllm(machine: Machine) -> None:
    machine.vllm = None  # type: ignore[assignment]
    assert detect.decide() == detect.Decision(None, "no Gaudi software here, and vLLM is not installed")


@pytest.mark.parametrize("choice", ["cpu", "cuda"])
def test_explicit_reference_device_wins(machine: Machine, choice: str) -> None:
    machine.choice, machine.own, machine.cuda = choice, ["cuda"], True
    machine.software, machine.cards = True, ["accel0"]
    assert detect.decide().device == choice
    assert vllm_gaudi_ucm.register() == "vllm_gaudi_ucm.platform.platform.UcmPlatform"


def test_explicit_cuda_without_a_gpu_raises(machine: Machine) -> None:
    machine.choice = "cuda"
    with pytest.raises(RuntimeError, match="VLLM_GAUDI_UCM_DEVICE=cuda: torch sees no CUDA device"):
        detect.decide()


def test_explicit_hpu(machine: Machine) -> None:
    """Without a visible node an explicit choice still holds: the device itself will say what is wrong."""
    machine.choice, machine.software = "hpu", True
    assert detect.decide() == detect.Decision("hpu", "VLLM_GAUDI_UCM_DEVICE=hpu (0 Gaudi cards under /dev)")


def test_explicit_hpu_without_software_raises_what_is_missing(machine: Machine) -> None:
    """covers: D10. register() raises by itself, and does not quietly take another device."""
    machine.choice = "hpu"
    with pytest.raises(RuntimeError, match=r"habana_frameworks\.torch .* is missing; install the Gaudi software"):
        vllm_gaudi_ucm.register()


def node(root: Path, name: str, vendor: str | None) -> None:
    """A device node, and the PCI vendor that sysfs says (None: no sysfs)."""
    (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "dev" / name).touch()
    if vendor is not None:
        folder = root / "sys/class/accel" / Path(name).name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")


def test_cards_are_told_by_their_vendor(tmp_path: Path) -> None:
    """Another maker's accelerator under /dev/accel is no Gaudi; a node whose vendor is hidden counts."""
    assert detect.gaudi_cards(tmp_path) == []
    node(tmp_path, "accel/accel0", "0x8086")
    assert detect.gaudi_cards(tmp_path) == []
    node(tmp_path, "accel/accel1", "0x1da3")
    node(tmp_path, "accel/accel2", None)
    node(tmp_path, "accel/accel_controlD1", "0x1da3")
    assert detect.gaudi_cards(tmp_path) == ["accel1", "accel2"]


def test_nodes_of_older_drivers(tmp_path: Path) -> None:
    node(tmp_path, "hl0", None)
    node(tmp_path, "hl_controlD0", None)
    assert detect.gaudi_cards(tmp_path) == ["hl0"]


def test_no_gaudi_software_in_this_environment() -> None:
    assert detect.has_gaudi_software() is False


@pytest.mark.parametrize(("build", "count", "found"), [(None, 1, False), ("13.0", 0, False), ("13.0", 1, True)])
def test_cuda_is_counted_without_starting_it(
    monkeypatch: pytest.MonkeyPatch, build: str | None, count: int, found: bool
) -> None:
    def started() -> bool:
        raise AssertionError("is_available starts CUDA: forked workers would break")

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", started)
    assert detect.has_cuda() is found


SEES_SIMULATOR = """
import sys
from vllm_gaudi_ucm.device import detect
assert detect.has_gaudi_software()
detect.gaudi_cards = lambda: ["accel0"]
assert detect.decide().device == "hpu"
assert "habana_frameworks.torch" not in sys.modules, "deciding imported the bridge, which sets up the card"
assert "vllm" not in sys.modules
"""
LIGHT = """
import sys
import vllm_gaudi_ucm
import vllm_gaudi_ucm.cli.main
heavy = {"torch", "vllm", "pydantic", "rich", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
# What vLLM does: it calls register() while it is resolving `current_platform`, which must not resolve it again.
RESOLVES = """
from vllm.platforms import resolve_current_platform_cls_qualname
print(resolve_current_platform_cls_qualname())
"""


def run(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter with the given variables and no device choice."""
    import os

    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | extra
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)


def test_software_is_found_without_importing_it() -> None:
    done = run(SEES_SIMULATOR, PYTHONPATH=SIM_PATH)
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    done = run(LIGHT)
    assert done.returncode == 0, done.stderr


def test_register_while_vllm_resolves_its_platform() -> None:
    done = run(RESOLVES, VLLM_GAUDI_UCM_DEVICE="auto")
    assert done.stdout.splitlines()[-1] == "vllm_gaudi_ucm.platform.platform.UcmPlatform", done.stderr
