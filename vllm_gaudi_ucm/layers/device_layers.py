"""Replacements of vLLM's layers for a device."""

from collections.abc import Callable

from vllm_gaudi_ucm.registry import Registry, those_installed

_LAYERS: Registry[Callable[[], None]] = Registry(
    "layers of a device",
    **those_installed(
        cpu="vllm_gaudi_ucm.layers.cpu.layers:register_cpu_layers",
        cuda="vllm_gaudi_ucm.layers.cuda.layers:register_cuda_layers",
        hpu="vllm_gaudi_ucm.layers.hpu.layers:register_gaudi_layers",
    ),
)


def register_device_layers(device: str) -> None:
    """Builds models that are loaded afterwards in this process with our layers for this type of device, if there are
    any.

    Safe to call more than once.
    """
    if device in _LAYERS:
        _LAYERS.get(device)()
