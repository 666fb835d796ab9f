"""Peak figures of devices, for cost models. Everything derived from them is modelled, not measured."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class DeviceFigures:
    """Peaks of one device.

    flops: per second, in the type that weights have there.
    bandwidth: bytes per second of device memory.
    memory: bytes of device memory.
    launch_seconds: fixed cost of a replay, and of each attention part in it.
    compile_seconds: compilation and capture of one new shape.
    graph_bytes: device memory of one captured graph, beside its activations.
    source: where the figures come from.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    launch_seconds: float
    compile_seconds: float
    graph_bytes: float
    source: str


# Gaudi: a new shape takes 0.2 to 14 s (their geometric mean is used), 300 buckets need 20 to 30 GiB.
GAUDI_COMPILE_SECONDS = 1.7
GAUDI_GRAPH_BYTES = 85e6

DEVICES = {
    device.name: device
    for device in (
        DeviceFigures(
            "gaudi2", 432e12, 2.45e12, 96 * GB, 20e-6, GAUDI_COMPILE_SECONDS, GAUDI_GRAPH_BYTES, "vendor's papers"
        ),
        DeviceFigures(
            "gaudi3", 1835e12, 3.7e12, 128 * GB, 20e-6, GAUDI_COMPILE_SECONDS, GAUDI_GRAPH_BYTES, "vendor's papers"
        ),
        DeviceFigures("h200", 989e12, 4.8e12, 141 * GB, 10e-6, 0.3, 8e6, "vendor's data sheet, dense bf16"),
        DeviceFigures(
            "cpu", 47e9, 15e9, 8 * GB, 20e-6, 0.0, 0.0, "measured: fp32, two cores of a 2.6 GHz AMD EPYC, torch 2.13"
        ),
    )
}


def device_figures(name: str) -> DeviceFigures:
    """The figures of a device; an unknown name raises a ValueError that lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"device {name!r} is unknown, expected one of {', '.join(DEVICES)}") from None
