"""Probes 18 and 19: reading a KV cache, and matrix products with results in float32."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error

BLOCK = 128 * 8 * 128  # tokens, heads, head size


def gather(bench: Bench) -> None:
    """Probe 18."""
    counts = bench.pick((16, 64), (256, 1024, 4096, 8192))
    cache = bench.random(max(counts) + 1, bench.pick(256, BLOCK), dtype=torch.bfloat16)
    gathered, sliced = [], []
    for count in counts:
        order = torch.arange(count)
        index = order.to(bench.torch_device)
        by_index = bench.region(lambda cache, index: cache.index_select(0, index) * 2)
        by_slice = bench.region(lambda cache, count=count: cache[:count] * 2)
        same = torch.equal(by_index(cache, index).cpu(), by_slice(cache).cpu())
        bench.claim(f"{count} blocks", "the same" if same else "different", "the same")
        moved = count * cache.shape[1] * cache.element_size() / 1e9
        gathered.append((float(count), moved / bench.seconds(lambda: by_index(cache, index))))  # noqa: B023
        sliced.append((float(count), moved / bench.seconds(lambda: by_slice(cache))))  # noqa: B023
    bench.series("by index_select", "blocks", "GB/s", gathered)
    bench.series("as a slice", "blocks", "GB/s", sliced)
    ratio = gathered[-1][1] / max(sliced[-1][1], 1e-9)
    bench.measure(f"index_select of {counts[-1]} blocks", ratio, "x the bandwidth of a slice")


def wide_product(bench: Bench) -> None:
    """Probe 19."""
    n = bench.pick(64, 4096)
    a, b = bench.random(n, n, dtype=torch.bfloat16), bench.random(n, n, dtype=torch.bfloat16)
    out = torch.empty(n, n, dtype=torch.float32, device=bench.torch_device)
    found = attempt(lambda: torch.matmul(a, b, out=out))
    expected = "allowed" if bench.kind == "hpu" else "refused"
    found_text = "allowed" if found.ok else f"refused: {found.error}"
    bench.claim("matmul(bf16, bf16, out=f32)", found_text, expected, found.ok == (bench.kind == "hpu"))
    flops = 2 * n**3 / 1e12
    if found.ok:
        error = relative_error(out, a.cpu().double() @ b.cpu().double())
        bench.claim("relative error", f"{error:.1e}", "below 1e-4", error < 1e-4)
        bench.measure("into f32", flops / bench.seconds(lambda: torch.matmul(a, b, out=out)), "TFLOPS")
    bench.measure("into bf16", flops / bench.seconds(lambda: torch.matmul(a, b)), "TFLOPS")
    wide = flops / bench.seconds(lambda: torch.matmul(a.float(), b.float()))
    bench.measure("from f32", wide, "TFLOPS")
