"""Probes 10 and 11: integers in a region, and indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error

ROWS = 8
NORM_ERROR = 1e-5
SHAPES = ((7,), (64, 33), (8, 128, 16))


def where_and_norm(bench: Bench) -> None:
    """Probe 10: every pattern separately, so that the report names the wrong ones."""
    wrong = []
    for dtype in (torch.int32, torch.int64):
        for shape in SHAPES:
            a, b = (torch.randint(-1000, 1000, shape, dtype=dtype) for _ in range(2))
            mask = torch.rand(shape) < 0.5
            for name, form in _PATTERNS.items():
                expected = form(mask, a, b)
                run = bench.region(form)
                found = attempt(lambda: run(*(one.to(bench.torch_device) for one in (mask, a, b))).cpu())  # noqa: B023
                if not found.ok or not torch.equal(found.value, expected):
                    wrong.append(f"{name} {dtype} {list(shape)}: {found.error or 'wrong values'}")
    outcome = ", ".join(wrong) or "all right"
    if bench.mode == "compile":
        bench.answer("integer patterns", outcome)
    else:
        bench.claim("integer patterns", outcome, "all right")
    x = torch.randn(64, 128)

    def norm(x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)

    error = relative_error(bench.region(norm)(x.to(bench.torch_device)), norm(x.double()))
    if bench.mode == "compile":
        bench.answer("l2-norm, relative error", f"{error:.1e}")
    else:
        bench.claim("l2-norm, relative error", f"{error:.1e}", f"below {NORM_ERROR}", error < NORM_ERROR)


def _scalar_branch(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask, a, -1)


_PATTERNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "where(mask, a, b)": torch.where,
    "where(mask, a, -1)": _scalar_branch,
    "where(a < b, a, b)": lambda mask, a, b: torch.where(a < b, a, b),
    "remainder(a, 7)": lambda mask, a, b: torch.remainder(a, 7),
}


def out_of_range(bench: Bench) -> None:
    """Probe 11: one operator and one index in each process, because an error may take the device with it."""
    operator, _, which = bench.case.rpartition(" ")
    index = -1 if which == "-1" else ROWS
    x = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4).to(bench.torch_device)
    chosen = torch.tensor([0, index, 2]).to(bench.torch_device)
    source = torch.full((3, 4), 100.0).to(bench.torch_device)
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "one_hot": lambda x, i, s: torch.nn.functional.one_hot(i, ROWS),
        "index_select": lambda x, i, s: x.index_select(0, i),
        "index_copy_": lambda x, i, s: x.clone().index_copy_(0, i, s),
        "gather": lambda x, i, s: x.gather(0, i[:, None].expand(3, 4)),
    }
    run: Any = bench.region(calls[operator])
    found = attempt(lambda: run(x, chosen, source).cpu())
    if found.ok:
        outcome = f"no error; row of it: {found.value[1].tolist()}"
        if operator == "index_copy_":
            outcome = f"no error; rows written: {(found.value == 100).all(1).nonzero().flatten().tolist()}"
    else:
        outcome = f"raises {found.error}"
    if bench.kind == "cpu" and bench.mode == "eager":
        bench.claim(bench.case, outcome, "raises", not found.ok)
    else:
        bench.answer(bench.case, outcome)
