"""Probes 5, 6 and 7: writes to a KV cache inside a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt

HEADS, DIM = 8, 128
ROWS = 64
GROWTH = 4
MOST_GROWTH = 2.0  # of the time, if the cache is GROWTH times as large
Write = Callable[..., Any]


def base_tensors(bench: Bench) -> None:
    """Probe 5: two base tensors, one index_copy_ each; attention reads what the write returned."""

    def write(keys: Tensor, values: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        keys, values = keys.index_copy_(0, slots, new), values.index_copy_(0, slots, new + 1)
        return keys.index_select(0, slots) + values.index_select(0, slots)

    # 1 GiB of K at the full size
    rows = bench.pick(1024, 2**30 // (2 * HEADS * DIM) // GROWTH)
    seconds, memory = [], []
    for size in (rows, rows * GROWTH):
        run = bench.region(write)
        keys, values = _cache(bench, size), _cache(bench, size)
        slots, new = _slots(bench, size), _new(bench)
        returned = run(keys, values, slots, new)
        _judge(bench, f"K of {size} tokens", keys, slots, new)
        _judge(bench, f"V of {size} tokens", values, slots, new + 1)
        bench.claim("what the region reads", bool(torch.equal(returned.cpu(), (2 * new + 1).cpu())), True)
        before = bench.used_memory()
        seconds.append(bench.seconds(lambda: run(keys, values, slots, new)))  # noqa: B023 - called at once
        memory.append(bench.used_memory() - before)
        bench.measure(f"write into {size} tokens", 1e6 * seconds[-1], "us")
        bench.measure(f"memory of it, {size} tokens", memory[-1], "bytes")
    _judge_growth(bench, "index_copy_", seconds)


def other_writes(bench: Bench) -> None:
    """Probe 7."""
    forms: dict[str, Write] = {
        "index_put_": lambda cache, slots, new: cache.index_put_((slots,), new),
        "slice assignment": _assign,
        "scatter_": lambda cache, slots, new: cache.scatter_(0, slots[:, None, None].expand_as(new), new),
    }
    rows = bench.pick(1024, 2**20 // GROWTH)
    for name, form in forms.items():
        seconds = []
        for size in (rows, rows * GROWTH):
            cache, new = _cache(bench, size), _new(bench)
            slots = torch.arange(ROWS, device=bench.torch_device) if form is _assign else _slots(bench, size)
            run = bench.region(form)
            outcome = attempt(lambda: run(cache, slots, new))  # noqa: B023 - called at once
            if not outcome.ok:
                bench.claim(name, outcome.error, "works")
                break
            _judge(bench, f"{name}, {size} tokens", cache, slots, new)
            seconds.append(bench.seconds(lambda: run(cache, slots, new)))  # noqa: B023 - called at once
            bench.measure(f"{name} into {size} tokens", 1e6 * seconds[-1], "us")
        if len(seconds) == 2 and seconds[0] > 0:
            bench.measure(f"{name}, {GROWTH}x the cache", seconds[1] / seconds[0], "x the time")


def _assign(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache[:ROWS] = new


def aliases(bench: Bench) -> None:
    """Probe 6: one pattern in each process. In compile mode whether the write is kept is an open question."""
    size = bench.pick(256, 65536)
    slots, new = _slots(bench, size), _new(bench)

    def stacked(base: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        return base[1].index_copy_(0, slots, new)

    def dtype_view(base: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        return base.view(torch.bfloat16).index_copy_(0, slots, new)

    def two_aliases(one: Tensor, other: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        return one.index_copy_(0, slots, new) + other.index_copy_(0, slots, new).sum()

    if bench.case == "stacked":
        base = torch.zeros(2, size, HEADS, DIM, dtype=torch.bfloat16, device=bench.torch_device)
        outcome = attempt(lambda: bench.region(stacked)(base, slots, new))
        written = base[1]
    elif bench.case == "dtype view":
        raw = torch.zeros(size, HEADS, 2 * DIM, dtype=torch.uint8, device=bench.torch_device)
        outcome = attempt(lambda: bench.region(dtype_view)(raw, slots, new))
        written = raw.view(torch.bfloat16)
    else:
        whole = torch.zeros(size, HEADS, DIM, dtype=torch.bfloat16, device=bench.torch_device)
        outcome = attempt(lambda: bench.region(two_aliases)(whole, whole.view(size, HEADS, DIM), slots, new))
        written = whole
    kept = outcome.error or _kept(written, slots, new)
    if bench.mode == "compile":
        bench.answer(f"write, {bench.case}", kept)
    else:
        bench.claim(f"write, {bench.case}", kept, "kept")


def _kept(cache: Tensor, slots: Tensor, new: Tensor) -> str:
    host = cache.cpu()
    if torch.equal(host[slots.cpu()], new.cpu()):
        return "kept"
    return "dropped" if not host.any() else "wrong"


def _judge(bench: Bench, name: str, cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Checks that the rows hold the written values, and the others their old ones."""
    kept = _kept(cache, slots, new)
    written = int(cache.cpu().flatten(1).any(1).sum())
    bench.claim(name, f"{kept}, {written} rows written", f"kept, {ROWS} rows written")


def _judge_growth(bench: Bench, name: str, seconds: list[float]) -> None:
    ratio = seconds[1] / max(seconds[0], 1e-9)
    if bench.kind == "hpu" and bench.mode == "compile":
        bench.answer(f"{name} is made in-place", f"{ratio:.2f}x the time for {GROWTH}x the cache (copied: {GROWTH}x)")
    if bench.full and bench.kind != "cpu":
        words = f"{ratio:.2f}x the time for {GROWTH}x the cache"
        bench.claim(f"{name} does not copy the cache", words, f"below {MOST_GROWTH}x", ratio < MOST_GROWTH)
    else:
        bench.measure(f"{name}, {GROWTH}x the cache", ratio, "x the time")


def _cache(bench: Bench, size: int) -> Tensor:
    return torch.zeros(size, HEADS, DIM, dtype=torch.bfloat16, device=bench.torch_device)


def _new(bench: Bench) -> Tensor:
    """Small integers, which bf16 holds exactly, and none of them 0."""
    return torch.randint(1, 64, (ROWS, HEADS, DIM)).to(torch.bfloat16).to(bench.torch_device)


def _slots(bench: Bench, size: int) -> Tensor:
    return torch.randperm(size)[:ROWS].to(bench.torch_device)
