"""Probes 12 and 23: random numbers in a region; topk, sort and cumsum over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error
from vllm_gaudi_ucm_tools.first_hour.fallbacks import fallbacks

SUM_ERROR = 1e-4


def random_numbers(bench: Bench) -> None:
    """Probe 12."""
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "exponential_": lambda x: torch.empty_like(x).exponential_(1.0),
        "multinomial": lambda x: torch.multinomial(x, 4),
        "rand": torch.rand_like,
    }
    x = torch.full((16, 512), 1 / 512).to(bench.torch_device)
    for name, form in forms.items():
        run = bench.region(form)
        found = attempt(lambda: [run(x).cpu() for _ in range(2)])  # noqa: B023 - called at once
        if not bench.claim(name, found.error or "works", "works"):
            continue
        fresh = not torch.equal(*found.value)
        if name == "exponential_" and bench.kind == "hpu" and bench.mode == "compile":
            bench.answer(f"{name}, two calls", "differ" if fresh else "are equal")
        else:
            bench.claim(f"{name}, two calls", "differ" if fresh else "are equal", "differ")
        seeded = []
        for _ in range(2):
            bench.device.seed_all(7)
            seeded.append(run(x).cpu())
        same = torch.equal(*seeded)
        bench.claim(f"{name}, seeded twice", "equal" if same else "differ", "equal")


def order(bench: Bench) -> None:
    """Probe 23."""
    rows, vocabulary = bench.pick((2, 2000), (8, 150_000))
    # all values differ, so that indices are comparable
    x = torch.stack([torch.randperm(vocabulary) for _ in range(rows)]).float()
    logits = x.to(bench.torch_device)
    points = []
    for k in (1, 8, 64, 256, 1024):
        topk = bench.region(lambda x, k=k: torch.topk(x, k).indices)
        with fallbacks(bench.kind) as found:
            same = torch.equal(topk(logits).cpu(), torch.topk(x, k).indices)
        bench.claim(f"topk {k}", f"{'right' if same else 'wrong'}{found}", "right")
        points.append((float(k), 1e6 * bench.seconds(lambda: topk(logits), 3)))  # noqa: B023 - called at once
    bench.series(f"topk of {rows} x {vocabulary}", "k", "us", points)
    sort = bench.region(lambda x: torch.sort(x, -1, descending=True).indices)
    _judge(bench, "sort", sort, logits, torch.sort(x, -1, descending=True).indices)
    stable = bench.region(lambda x: torch.sort(x, dim=-1, stable=True).indices)
    _judge(bench, "stable sort", stable, logits, torch.sort(x, dim=-1, stable=True).indices)
    probabilities = torch.softmax(torch.randn(rows, vocabulary), -1)
    sums = bench.region(lambda x: torch.cumsum(x, -1))
    error = relative_error(sums(probabilities.to(bench.torch_device)), probabilities.double().cumsum(-1))
    bench.claim("cumsum, relative error", f"{error:.1e}", f"below {SUM_ERROR}", error < SUM_ERROR)
    bench.measure("cumsum", 1e6 * bench.seconds(lambda: sums(logits), 3), "us")


def _judge(bench: Bench, name: str, run: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> None:
    with fallbacks(bench.kind) as found:
        outcome = attempt(lambda: run(x).cpu())
    if not outcome.ok:
        bench.claim(name, outcome.error, "right")
        return
    right = torch.equal(outcome.value, expected)
    bench.claim(name, f"{'right' if right else 'wrong'}{found}", "right", right)
    bench.measure(name, 1e6 * bench.seconds(lambda: run(x), 3), "us")
