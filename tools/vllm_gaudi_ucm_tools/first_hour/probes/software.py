"""Probes 30 and 31: features documented as new in Gaudi software 1.24.2, which may exist in 1.24.1 as well."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart

LIMIT_S = 120
REUSE = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
STEPS = 4
ROWS, SIZE, DIM = 16, 64, 128
EMPTY_HOST_CACHE = """
import torch
import habana_frameworks.torch

torch.ones(8, pin_memory=True).to("hpu").cpu()
torch.accelerator.empty_host_cache()
print("returned", flush=True)
"""


def input_reuse(bench: Bench) -> None:
    """Probe 30: starts itself with input reuse off and on."""
    settings = {"kind": bench.kind, "mode": bench.mode, "case": "", "model": "", "minutes": 0, "sizes": "small"}
    for value in ("0", "1"):
        request = {"function": "software:write_steps", "bench": {**settings, "folder": str(bench.folder)}}
        ending = run_apart({**request, "limit_s": LIMIT_S}, {REUSE: value}, LIMIT_S)
        claims = [event for event in ending.events if event["kind"] == "claim"]
        wrong = [f"{one['name']}: {one['found']}" for one in claims if not one["ok"]]
        found = ", ".join(wrong) or ("right" if len(claims) == STEPS else f"no answer: {ending.log[-200:]}")
        bench.answer(f"{REUSE}={value}", found)
        if value == "0":
            bench.claim("writes without input reuse", found, "right")


def write_steps(bench: Bench) -> None:
    """Not a probe: steps that write into a cache of NaN, in one of the processes of probe 30."""

    def step(cache: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        return cache.index_copy_(0, slots, new).index_select(0, slots) + new

    run = bench.region(step)
    cache = torch.full((SIZE, DIM), float("nan"), dtype=torch.bfloat16, device=bench.torch_device)
    host = cache.cpu()
    for number in range(STEPS):
        slots = torch.randperm(SIZE)[:ROWS]
        new = torch.randint(1, 64, (ROWS, DIM)).to(torch.bfloat16)
        on_device = new.to(bench.torch_device)
        returned = run(cache, slots.to(bench.torch_device), on_device)
        host[slots] = new
        found = {
            "cache": torch.equal(cache.cpu().nan_to_num(-1), host.nan_to_num(-1)),
            "input": torch.equal(on_device.cpu(), new),
            "result": torch.equal(returned.cpu(), 2 * new),
        }
        wrong = ", ".join(name for name, right in found.items() if not right)
        bench.claim(f"step {number + 1}", f"wrong {wrong}" if wrong else "right", "right")


def host_cache(bench: Bench) -> None:
    """Probe 31: a process of its own, because the call reportedly ends it when the interpreter exits."""
    command = [sys.executable, "-c", EMPTY_HOST_CACHE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    call = "returned" if "returned" in done.stdout else f"raised ({last[:150]})"
    bench.answer("torch.accelerator.empty_host_cache", f"{call}; the process ended with status {done.returncode}")
