"""Devices: the choice of one (`detect`), and the abilities of each (`base`, `cpu`, `cuda`, `hpu`)."""

from vllm_gaudi_ucm.device.base import Device, Fence, Memory

__all__ = ["Device", "Fence", "Memory", "get_device"]


def get_device(kind: str) -> Device:
    """The device of a kind (`cpu`, `cuda`, `hpu`). Starts nothing: a card is touched by the first method call."""
    if kind == "cpu":
        from vllm_gaudi_ucm.device.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from vllm_gaudi_ucm.device.cuda import CudaDevice

        return CudaDevice()
    if kind == "hpu":
        from vllm_gaudi_ucm.device.hpu import HpuDevice

        return HpuDevice()
    raise ValueError(f"device kind: found {kind!r}, expected one of cpu, cuda, hpu")
