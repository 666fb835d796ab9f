"""Probe 21: collectives of two cards, each driven by a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart
from vllm_gaudi_ucm_tools.first_hour.loading import DoesNotApply
from vllm_gaudi_ucm_tools.first_hour.result import Ending

WORLD = 2
LIMIT_S = 200
ROUNDED = 2**24 + 1
# torch 2.13 renames both, and warns of the first names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collectives(bench: Bench) -> None:
    """Probe 21."""
    count = torch.hpu.device_count()  # type: ignore[attr-defined]  # the bridge adds it
    if count < WORLD:
        raise DoesNotApply(f"{count} card is visible, two are needed")
    between_two(bench)


def between_two(bench: Bench) -> None:
    """Starts both processes; the findings of rank 0 are the probe's."""
    endings: dict[int, Ending] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: endings.update({rank: _start(bench, rank)})) for rank in range(WORLD)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, ending in sorted(endings.items()):
        end = [event for event in ending.events if event["kind"] == "end"]
        how = end[0]["status"] if end else f"exit status {ending.status}: {ending.log[-300:]}"
        bench.claim(f"rank {rank}", how, "done")
    for event in endings[0].events:
        values = {key: value for key, value in event.items() if key != "kind"}
        if event["kind"] == "claim":
            bench.claim(values["name"], values["found"], values["expected"], values["ok"])
        elif event["kind"] == "answer":
            bench.answer(values["name"], values["text"])
        elif event["kind"] == "measure":
            bench.measure(values["name"], values["value"], values["unit"])


def _start(bench: Bench, rank: int) -> Ending:
    settings: dict[str, Any] = {"kind": bench.kind, "mode": bench.mode, "case": str(rank), "model": "", "minutes": 0}
    settings |= {"sizes": "full" if bench.full else "small", "folder": str(bench.folder)}
    request = {"function": "cards:rank", "bench": settings, "limit_s": LIMIT_S}
    changes = {"HLS_MODULE_ID": str(rank), "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    return run_apart(request, changes, LIMIT_S)


def rank(bench: Bench) -> None:
    """Not a probe: one of the two processes."""
    import habana_frameworks.torch.distributed.hccl  # noqa: F401 - registers it

    mine = int(bench.case)
    place = f"file://{bench.folder}/rendezvous-{bench.mode}"
    dist.init_process_group("hccl", place, timedelta(seconds=60), WORLD, mine)
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64):
        x = torch.full((64,), 3 + mine, dtype=dtype).to(bench.torch_device)
        found = attempt(lambda: bench.region(_sum)(x).cpu()[0].item())  # noqa: B023 - called at once
        bench.claim(f"all_reduce {dtype}", found.error or found.value, 7)
    eighths = torch.full((64,), 3.0 + mine).to(torch.float8_e4m3fn).to(bench.torch_device)
    bench.answer("all_reduce fp8 of 3 and 4", _text(lambda: _sum(eighths).float().cpu()[0].item()))
    _layer(bench, mine)
    big = torch.full((2,), ROUNDED if mine == 0 else 0, dtype=torch.int64).to(bench.torch_device)
    bench.answer(f"all_reduce of {ROUNDED}", _text(lambda: _sum(big).cpu()[0].item()))
    odd = torch.ones(3, dtype=torch.uint8).to(bench.torch_device)
    bench.answer("all_reduce uint8 of 3 elements", _text(lambda: _sum(odd).cpu().tolist()))
    x = torch.arange(4.0).to(bench.torch_device) + mine
    half, both = (torch.empty(n, device=bench.torch_device) for n in (2, 8))
    bench.claim("reduce_scatter_tensor", _text(lambda: _scatter(half, x)), [[1.0, 3.0], [5.0, 7.0]][mine])
    bench.claim("all_gather_into_tensor", _text(lambda: _gather(both, x)), [0, 1, 2, 3, 1, 2, 3, 4.0])
    for size in (8 << 10, bench.pick(1 << 16, 8 << 20)):
        payload = torch.zeros(size // 4, device=bench.torch_device)
        bench.measure(f"all_reduce of {size} bytes", 1e6 * bench.seconds(lambda: _sum(payload)), "us")  # noqa: B023
    dist.destroy_process_group()


def _layer(bench: Bench, mine: int) -> None:
    """Runs a layer as in a model in two parts: a product, the sum of both parts, and the next product. Returns its
    recipes.
    """
    a, b = torch.eye(16) * (1 + mine), torch.full((16, 16), 2.0)

    def layer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _sum(torch.mm(a, b)) * 0.5 + 1

    run, on_device = bench.region(layer), [one.to(bench.torch_device) for one in (a, b)]
    values: list[Any] = []
    compiled = bench.compilations(lambda: values.append(attempt(lambda: run(*on_device).cpu())))
    found = values[0]
    bench.claim("a layer with an all_reduce", found.error or found.value[0, 0].item(), 4.0)
    bench.answer("partitions of a layer with one all_reduce", f"{compiled} compilations, 1 if it stays in the graph")


def _sum(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _scatter(half: torch.Tensor, x: torch.Tensor) -> list[float]:
    _REDUCE_SCATTER(half, x)
    found: list[float] = half.cpu().tolist()
    return found


def _gather(both: torch.Tensor, x: torch.Tensor) -> list[float]:
    _ALL_GATHER(both, x)
    found: list[float] = both.cpu().tolist()
    return found


def _text(call: Callable[[], Any]) -> Any:
    found = attempt(call)
    return found.error or found.value
