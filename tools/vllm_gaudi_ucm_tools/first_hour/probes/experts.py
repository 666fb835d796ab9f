"""Probe 32: experts of few rows, by the vendor's operator and gathered."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error

ROUNDING = 3e-2  # of products in bf16, added up in another order


def few_rows(bench: Bench) -> None:
    """Probe 32."""
    from vllm_gaudi_ucm.ops.moe.impl.hpu.experts import HpuMoe
    from vllm_gaudi_ucm.ops.moe.impl.hpu.gathered import compute_gathered, gathering_pays

    count, inner, hidden, chosen = bench.pick((16, 32, 64, 2), (128, 768, 2048, 8))
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    weights = ExpertWeights(*(bench.random(*shape, dtype=torch.bfloat16) * shape[2] ** -0.5 for shape in shapes))
    spec = MoeSpec()
    operator = HpuMoe("hpu")
    if not bench.claim("hpu.mixture_of_experts.fused_weights", operator.supports(spec), True):
        return
    form = operator.prepare(weights, spec)
    series: dict[str, list[tuple[float, float]]] = {"operator": [], "gathered": []}
    for rows in (1, 2, 4, 8):
        x = bench.random(rows, hidden, dtype=torch.bfloat16)
        numbers = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)])
        ids, shares = numbers.to(bench.torch_device), bench.random(rows, chosen).softmax(-1)
        by_operator = bench.region(lambda x, ids, shares: operator.fused(x, ids, shares, form, spec))
        by_gathering = bench.region(lambda x, ids, shares: compute_gathered(x, ids, shares, weights, spec))
        found = attempt(lambda: [run(x, ids, shares).cpu() for run in (by_operator, by_gathering)])  # noqa: B023
        if not bench.claim(f"{rows} rows", found.error or "works", "works"):
            return
        error = relative_error(found.value[1], found.value[0].double())
        bench.claim(f"difference at {rows} rows", f"{error:.1e}", f"below {ROUNDING}", error < ROUNDING)
        for name, run in (("operator", by_operator), ("gathered", by_gathering)):
            taken = 1e6 * bench.seconds(lambda: run(x, ids, shares))  # noqa: B023 - called at once
            bench.measure(f"{name}, {rows} rows", taken, "us")
            series[name].append((float(rows), taken))
    for name, points in series.items():
        bench.series(name, "rows", "us", points)
    pays = [rows for rows, _ in series["operator"] if gathering_pays(int(rows), chosen, weights)]
    faster = [a[0] for a, b in zip(series["operator"], series["gathered"], strict=True) if b[1] < a[1]]
    bench.answer("rows that gather, by the model", pays)
    bench.answer("rows for which gathering took less time", faster)
