"""Probes 3, 4 and 15: causes of recompilation, and compile-only mode."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt

COMPILE_ONLY = "PT_COMPILE_ONLY_MODE"
OFFSETS = 8


def double(x: Tensor) -> Tensor:
    """The smallest region."""
    return x * 2 + 1


def three_shapes(bench: Bench) -> None:
    """Probe 3."""
    run = bench.region(double)
    inputs = [bench.random(rows, 64) for rows in (4, 8, 16)]
    found = [bench.compilations(lambda x=x: run(x)) for x in inputs]  # type: ignore[misc]
    bench.claim("compilations of three shapes", found, [1, 1, 1])
    in_turn = bench.compilations(lambda: [run(x) for x in inputs[:2] * 4])
    bench.claim("compilations while two alternate", in_turn, 0)
    same = bench.seconds(lambda: [run(inputs[0]) for _ in range(8)]) / 8
    alternating = bench.seconds(lambda: [run(x) for x in inputs[:2] * 4]) / 8
    bench.measure("one shape, per call", 1e6 * same, "us")
    bench.measure("two in turn, per call", 1e6 * alternating, "us")
    # Dynamo may make a size symbolic at the second shape; the device still gets static recipes
    symbolic = bench.region(lambda x: x * 2 - 1, dynamic=None)
    recipes = [bench.compilations(lambda x=x: symbolic(x)) for x in inputs]  # type: ignore[misc]
    bench.answer("without dynamic=False", f"{recipes} compilations of three shapes")
    turn = bench.seconds(lambda: [symbolic(x) for x in inputs[:2] * 4]) / 8
    bench.measure("two in turn without dynamic=False, per call", 1e6 * turn, "us")


def offsets(bench: Bench) -> None:
    """Probe 4."""
    run = bench.region(double)
    whole = bench.random(OFFSETS * 4, 64)
    run(whole[:4])
    found = sum(bench.compilations(lambda i=i: run(whole[4 * i : 4 * i + 4])) for i in range(1, OFFSETS))  # type: ignore[misc]
    bench.answer("recipes of seven more offsets", f"{found} (7: each offset is a key, 0: none is)")


def compile_only(bench: Bench) -> None:
    """Probe 15."""
    setting = importlib.import_module("habana_frameworks.torch.internal.bridge_config").env_setting
    x = bench.random(bench.pick(64, 4096), 256)
    expected = double(x.cpu())
    run = bench.region(double)
    before = bench.used_memory()
    with setting(COMPILE_ONLY, True):
        bench.measure("compile only", bench.timed(lambda: run(x)), "s")
    bench.measure("memory of the compilation", bench.used_memory() - before, "bytes")
    first: list[float] = []
    compiled = bench.compilations(lambda: first.append(bench.timed(lambda: run(x))))
    bench.claim("compilations of the first execution", compiled, 0)
    bench.measure("first execution", first[0], "s")
    bench.measure("memory of the execution", bench.used_memory() - before, "bytes")
    bench.claim("a value after compile-only mode", bool(torch.equal(run(x).cpu(), expected)), True)
    together = bench.region(lambda x: x * 3 - 1)
    bench.measure("compiled and executed at once", bench.timed(lambda: together(x)), "s")
    bench.answer("an exception leaves it", "on" if _left_on(setting, run, x, expected) else "off")
    bench.claim("a value after it was switched off", bool(torch.equal(run(x).cpu(), expected)), True)


def _left_on(setting: Any, run: Any, x: Tensor, expected: Tensor) -> bool:
    """True if the mode is on after an exception inside; it is off when this returns."""
    guard: AbstractContextManager[None] = setting(COMPILE_ONLY, True)
    try:
        with guard:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    after = attempt(lambda: torch.equal(run(x).cpu(), expected))
    # entered and never left: leaving would restore the state that the exception has left behind
    setting(COMPILE_ONLY, False).__enter__()
    return not after.ok or not after.value
