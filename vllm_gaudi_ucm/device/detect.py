"""Chooses the device this plugin drives, or none. Never starts a device: a process forked after that would hang."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.vllm_api import platforms, versions

GAUDI_SOFTWARE = "habana_frameworks.torch"
# Habana Labs' PCI vendor. Other drivers (such as Intel's NPUs) make nodes under /dev/accel, too.
GAUDI_VENDOR = "0x1da3"


@dataclass(frozen=True)
class Decision:
    """The device to drive (None: leave vLLM alone) and the reason, for people."""

    device: str | None
    reason: str


def decide() -> Decision:
    """Decides from `VLLM_GAUDI_UCM_DEVICE`, Gaudi's software and cards, and vLLM's own platforms.

    Raises ValueError for an unknown choice, RuntimeError if the chosen device is not available.
    """
    choice = envs.device_choice()
    return _decide_auto() if choice == "auto" else _decide_explicit(choice)


def detect_device() -> str | None:
    """The device alone, as `register()` needs it."""
    return decide().device


def _decide_explicit(choice: str) -> Decision:
    asked = f"{envs.DEVICE}={choice}"
    if choice == "hpu":
        if not has_gaudi_software():
            raise RuntimeError(
                f"{asked}: the Python package {GAUDI_SOFTWARE} (habana-torch-plugin) is missing; install the Gaudi "
                "software, or choose cpu, cuda or auto"
            )
        return Decision("hpu", f"{asked} ({len(gaudi_cards())} Gaudi cards under /dev)")
    if choice == "cuda" and not has_cuda():
        raise RuntimeError(
            f"{asked}: torch sees no CUDA device; install a CUDA build of torch and the NVIDIA driver, "
            "or choose cpu, hpu or auto"
        )
    return Decision(choice, f"{asked} asks for the reference device")


def _decide_auto() -> Decision:
    cards = gaudi_cards()
    if has_gaudi_software() and cards:
        return Decision("hpu", f"Gaudi software and {len(cards)} Gaudi card(s) are present")
    missing = f"no {'Gaudi card' if has_gaudi_software() else 'Gaudi software'} here"
    if versions.installed_version("vllm") is None:
        return Decision(None, f"{missing}, and vLLM is not installed")
    own = platforms.vllm_own_platforms()
    if own:
        names = ", ".join(own)
        return Decision(None, f"{missing}, and vLLM has a platform of its own ({names}); set {envs.DEVICE} to use ours")
    device = "cuda" if has_cuda() else "cpu"
    return Decision(device, f"{missing}, and vLLM has no platform of its own: {device} as the reference device")


def has_gaudi_software() -> bool:
    """True if Gaudi's PyTorch bridge could be imported; it is not: the bridge sets up the device on import."""
    try:
        return importlib.util.find_spec(GAUDI_SOFTWARE) is not None
    except ModuleNotFoundError:
        return False


def gaudi_cards(root: Path = Path("/")) -> list[str]:
    """Names of the Gaudi device nodes: `accel0`, ... of the kernel's accelerator class, `hl0`, ... of older drivers."""
    nodes = [node.name for node in root.glob("dev/accel/accel[0-9]*") if _is_gaudi(root, node.name)]
    return sorted(nodes) or sorted(node.name for node in root.glob("dev/hl[0-9]*"))


def _is_gaudi(root: Path, node: str) -> bool:
    try:
        return (root / f"sys/class/accel/{node}/device/vendor").read_text().strip() == GAUDI_VENDOR
    except OSError:
        return True  # a container may hide sysfs; the node was given to it on purpose


def has_cuda() -> bool:
    """True if torch sees a GPU. `device_count` uses NVML; `is_available` would start CUDA and break forked workers."""
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0
