"""Probe 14: copies to and from the device, and whether they overlap with computation."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt

KIB, MIB = 1 << 10, 1 << 20


def copies(bench: Bench) -> None:
    """Probe 14."""
    for size in (64 * KIB, MIB, bench.pick(4 * MIB, 64 * MIB)):
        for pinned in (False, True):
            _to_device(bench, size, pinned)
        x = torch.arange(size, dtype=torch.int64).to(torch.uint8).to(bench.torch_device)
        seconds = bench.seconds(lambda: x.cpu())  # noqa: B023 - called at once
        bench.measure(f"{size // KIB} KiB to the host", size / seconds / 1e9, "GB/s")
    _overlap(bench)


def _to_device(bench: Bench, size: int, pinned: bool) -> None:
    kind = f"{size // KIB} KiB {'pinned' if pinned else 'unpinned'}"
    expected = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    source = attempt(lambda: expected.clone().pin_memory() if pinned else expected.clone())
    if not source.ok:
        bench.answer(kind, source.error)
        return
    host = source.value
    waited = host.to(bench.torch_device, copy=True)
    host.fill_(0)
    right = torch.equal(waited.cpu(), expected)
    bench.claim(f"{kind}, waiting", "right" if right else "corrupted", "right")
    host.copy_(expected)
    started = host.to(bench.torch_device, non_blocking=True, copy=True)
    host.fill_(0)
    bench.device.synchronize()
    outcome = "right" if torch.equal(started.cpu(), expected) else "corrupted"
    bench.answer(f"{kind}, not waiting, source overwritten", outcome)
    target = torch.empty(size, dtype=torch.uint8, device=bench.torch_device)
    seconds = bench.seconds(lambda: target.copy_(host))
    bench.measure(f"{kind} to the device", size / seconds / 1e9, "GB/s")


def _overlap(bench: Bench) -> None:
    """Times a copy on a stream of its own during products; 1 is no overlap."""
    n = bench.pick(256, 4096)
    a = bench.random(n, n, dtype=torch.bfloat16)
    host = torch.zeros(bench.pick(MIB, 64 * MIB), dtype=torch.uint8)
    target = torch.empty_like(host, device=bench.torch_device)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        fence = bench.device.fence()
        products()
        with bench.device.beside_computation(fence):
            target.copy_(host, non_blocking=True)

    apart = bench.seconds(products) + bench.seconds(lambda: target.copy_(host))
    ratio = bench.seconds(both) / apart
    bench.measure("copy and products together", ratio, "x the time of one after the other")
