"""Doctor's section on several devices: whether workers reach each other, and the speed of reductions.

Run as a module it is one of the workers: a process of its own, as an engine's workers are.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.child import ending_of, start

SECTION = "several devices"
OPTION = "--tensor-parallel-size"
LIMIT_SECONDS = 120
# Of a decode of 8 rows, and of a prompt of 1,024 tokens, with 4,096 numbers of two bytes each.
SIZES = (64 << 10, 8 << 20)
ROUNDS = 10
SHARED = Path("/dev/shm")
# of the largest queue between an engine and its workers, of which only written parts take memory (`MessageQueue`: 10
# chunks of 24 MiB)
LEAST_SHARED = 240 << 20


def collective_checks(device: str | None, workers: int) -> Iterator[Check]:
    """Rows on `workers` processes that really add up tensors; none for one worker.

    Cards are started by this, as serving would; imports nothing of vLLM.
    """
    if device is None or workers == 1:
        return
    if workers < 1:
        yield Check(SECTION, OPTION, "fail", str(workers), "1 or more", "correct the option")
        return
    if SHARED.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED).free)
    with tempfile.TemporaryDirectory(prefix="gaudi-ucm-doctor-") as folder:
        children = [_start(device, rank, workers, Path(folder) / "store") for rank in range(workers)]
        deadline = time.monotonic() + LIMIT_SECONDS
        endings = [_ending(child, deadline) for child in children]
    wrong = [f"worker {rank}: {ending}" for rank, ending in enumerate(endings) if isinstance(ending, str)]
    if wrong:
        advice = "see that as many devices are visible and free, and that processes reach each other over loopback"
        yield Check(SECTION, "workers", "fail", "; ".join(wrong), f"{workers} that add up a tensor", advice)
        return
    yield Check(SECTION, "workers", "ok", f"{workers} on {device} add up tensors")
    for index, size in enumerate(SIZES):
        slowest = max(ending[index] for ending in endings if not isinstance(ending, str))
        found = f"{1e6 * slowest:,.0f} us, {size / slowest * 1e-9:.1f} GB/s; a step has two in each layer"
        yield Check(SECTION, f"sum of {size >> 10} KiB", "info", found)


def shared_memory(free: int) -> Check:
    """Checks whether an engine of several workers has the memory for its queues. free: bytes there."""
    found, least = f"{free >> 20} MiB free", f"{LEAST_SHARED >> 20} MiB or more"
    if free >= LEAST_SHARED:
        return Check(SECTION, str(SHARED), "ok", found, least)
    advice = "start the container with --shm-size 2g (Compose: shm_size), or remount: mount -o remount,size=2g /dev/shm"
    return Check(SECTION, str(SHARED), "fail", found, least, advice)


def _start(device: str, rank: int, workers: int, store: Path) -> subprocess.Popen[str]:
    return start("vllm_gaudi_ucm.cli.doctor.collectives", device, str(rank), str(workers), str(store))


def _ending(child: subprocess.Popen[str], deadline: float) -> list[float] | str:
    """Seconds of each size, or why there are none."""
    ending = ending_of(child, max(deadline - time.monotonic(), 1.0))
    if ending.stdout is None:
        return f"no answer within {LIMIT_SECONDS} s"
    if child.returncode == 0:
        seconds: list[float] = json.loads(ending.stdout.splitlines()[-1])
        return seconds
    return f"it {ending.how}"


def measure(kind: str, rank: int, workers: int, store: str) -> list[float]:
    """Seconds of a sum over all workers, for each of SIZES; raises RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    from vllm_gaudi_ucm.device import get_device

    device = get_device(kind)
    device.take_device(rank)
    on = device.torch_device()
    limit = timedelta(seconds=LIMIT_SECONDS / 2)
    dist.init_process_group(device.dist_backend, f"file://{store}", limit, world_size=workers, rank=rank)
    seconds = []
    for size in SIZES:
        ones = torch.ones(size // 2, dtype=torch.bfloat16).to(on)
        dist.all_reduce(ones)
        found = ones[0].item()
        if found != workers:
            raise RuntimeError(f"{workers} workers that add up ones found {found}")
        payload = torch.zeros(size // 2, dtype=torch.bfloat16).to(on)
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            dist.all_reduce(payload)
        device.synchronize()
        seconds.append((time.perf_counter() - begin) / ROUNDS)
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
