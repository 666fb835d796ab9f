"""Probe 22: eight-bit floats."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error

LARGEST = {"GAUDI2": 240.0, "GAUDI3": 448.0}
E4M3_ERROR = 0.1


def fp8(bench: Bench) -> None:
    """Probe 22."""
    largest = LARGEST.get(bench.device.name(), 448.0)
    values = torch.tensor([1.0, 240.0, 300.0, 448.0, 1000.0])
    x = values.to(torch.bfloat16).to(bench.torch_device)

    def round_trip() -> list[float]:
        narrow = torch.ops.hpu.cast_to_fp8_v2(x, None, False, False, torch.float8_e4m3fn)[0]
        wide: list[float] = torch.ops.hpu.cast_from_fp8(narrow, None, torch.float32).cpu().tolist()
        return wide

    found = attempt(round_trip)
    if bench.claim("cast_to_fp8_v2 and back", found.error or "works", "works"):
        bench.claim("the largest value", max(found.value), largest)
        bench.answer(f"1, 240, 300, 448 and 1000 on {bench.device.name()}", found.value)
    _product(bench)
    _write(bench)


def _product(bench: Bench) -> None:
    rows, inner, columns = bench.pick((8, 32, 16), (128, 4096, 4096))
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    scale_a, scale_b = (one.abs().amax(1, keepdim=True) / 100 for one in (a, b))

    def product() -> torch.Tensor:
        on_device = [
            (one / scale).to(torch.bfloat16).to(bench.torch_device) for one, scale in ((a, scale_a), (b, scale_b))
        ]
        narrow = [torch.ops.hpu.cast_to_fp8_v2(one, None, False, False, torch.float8_e4m3fn)[0] for one in on_device]
        scales = scale_a.to(bench.torch_device), scale_b.flatten().to(bench.torch_device)
        result: torch.Tensor = torch.ops.hpu.fp8_gemm_v2(
            narrow[0], False, narrow[1], True, None, torch.bfloat16, *scales, None, False
        )
        return result

    found = attempt(product)
    if not bench.claim("fp8_gemm_v2 with scales per row and per channel", found.error or "works", "works"):
        return
    error = relative_error(found.value, a.double() @ b.double().T)
    bench.claim("relative error", f"{error:.1e}", f"below {E4M3_ERROR}", error < E4M3_ERROR)


def _write(bench: Bench) -> None:
    new = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn).to(bench.torch_device)
    cache = torch.zeros(8, 2).to(torch.float8_e4m3fn).to(bench.torch_device)
    slots = torch.tensor([5, 2]).to(bench.torch_device)
    run = bench.region(lambda cache, slots, new: cache.index_copy_(0, slots, new))
    found = attempt(lambda: run(cache, slots, new).cpu().float()[[5, 2]].tolist())
    bench.claim("index_copy_ of fp8", found.error or found.value, [[1.0, 2.0], [3.0, 4.0]])
