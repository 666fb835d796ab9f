"""Probes 1 and 2, and the record made before all others: the card, its software, torch.accelerator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from vllm_gaudi_ucm.device import detect
from vllm_gaudi_ucm.device.gaudi_software import BRIDGE, installed_gaudi_software
from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt
from vllm_gaudi_ucm_tools.first_hour.loading import is_upstream_torch

ALLOCATOR = "DeviceAllocator"
# vLLM's loader and its shared code call these; the first five raise on a Gaudi. `empty_host_cache`
# is probe 31, as it may end the process.
MEMORY_CALLS = ("empty_cache", "memory_stats", "memory_reserved", "get_memory_info", "reset_peak_memory_stats")
OTHER_CALLS = (
    *("synchronize", "current_device_index", "device_count", "current_stream", "memory_allocated"),
    *("current_accelerator", "is_available"),
)


def mode_and_name(bench: Bench) -> None:
    """Probe 1."""
    is_lazy = importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy
    if bench.mode == "lazy":
        refuses = is_upstream_torch()
        bench.claim("lazy mode", "starts" if is_lazy() else "does not start", "refused" if refuses else "starts")
        return
    bench.claim("is_lazy()", is_lazy(), False)
    hpu = torch.hpu  # type: ignore[attr-defined]  # the bridge adds it
    bench.claim("torch.hpu.is_available()", hpu.is_available(), True)
    name = bench.device.name()
    bench.claim("generation", name, "GAUDI2 or GAUDI3", name in ("GAUDI2", "GAUDI3"))
    memory = bench.device.memory()
    bench.claim("memory", f"{memory.free} of {memory.total} bytes free", "some", 0 < memory.free <= memory.total)
    bench.answer("card", f"{name}, {memory.total / 2**30:.1f} GiB, {hpu.device_count()} visible")
    flavour = "upstream" if is_upstream_torch() else "the vendor's fork"
    bench.answer("torch", f"{torch.__version__} ({flavour})")
    software = installed_gaudi_software()
    if software is None or software.expected_torch is None:
        bench.answer("Gaudi software", f"{software or 'no build number'}: a release that this plugin does not know")
    else:
        bench.claim("torch of the software", str(software), f"torch {software.expected_torch}", software.has_its_torch)
        bench.answer("Gaudi software", software)


def accelerator(bench: Bench) -> None:
    """Probe 2."""
    for name in MEMORY_CALLS:
        outcome = _call(name)
        raises = ALLOCATOR in outcome
        if bench.kind == "hpu":
            bench.claim(f"torch.accelerator.{name}", outcome, f"raises with {ALLOCATOR}", raises)
        else:
            bench.answer(name, outcome)
    for name in OTHER_CALLS:
        bench.answer(name, _call(name))


def _call(name: str) -> str:
    functions: dict[str, Callable[[], Any]] = vars(torch.accelerator)
    if name not in functions:
        return "absent"
    found = attempt(functions[name])
    return f"works ({type(found.value).__name__})" if found.ok else found.error


def machine(bench: Bench) -> None:
    """Not a probe: records the software for a reader of the report. Each line is guarded separately, because any may
    fail.
    """
    for name, read in (
        ("packages", _packages),
        ("torch", lambda: torch.__version__),
        ("flavour", lambda: "upstream" if is_upstream_torch() else "fork"),
        ("build", lambda: metadata.version(BRIDGE)),
        ("device", lambda: detect.decide().device),
        ("decision", lambda: detect.decide().reason),
        # these start the card
        ("device name", bench.device.name),
        ("memory", lambda: list(bench.device.memory())),
    ):
        found = attempt(read)
        bench.note(name, found.value if found.ok else f"({found.error})")


def _packages() -> dict[str, str]:
    pairs = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    return dict(sorted((name, version) for name, version in pairs if name))
