"""The CPU as a device: the reference on a machine with no accelerator."""

import gc
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import torch

from vllm_gaudi_ucm.device.base import Device, Fence, Memory
from vllm_gaudi_ucm.device.host_limits import Cgroup


class _Behind:
    """Everything before it has run."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        return True


class CpuDevice(Device):
    """The host's CPU and memory. `torch.accelerator` raises on a CPU-only torch and is never called."""

    kind = "cpu"
    dist_backend = "gloo"
    pins_host_memory = False

    def take_device(self, index: int) -> None:
        """All workers share the CPU."""

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def name(self) -> str:
        """The model name in /proc/cpuinfo, otherwise the platform module's name."""
        return cpu_model(Path("/proc/cpuinfo")) or platform.processor() or platform.machine()

    def synchronize(self) -> None:
        """Operations on the CPU have finished when they return."""

    def empty_cache(self) -> None:
        """torch caches no host memory; cyclic garbage may still hold tensors."""
        gc.collect()

    def memory(self) -> Memory:
        """The machine's memory, or the container's limit if that is less."""
        return host_memory(Cgroup())

    def seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def enter_thread(self) -> None:
        """Every thread has the CPU."""

    def fence(self) -> Fence:
        """Returns a fence that never waits: work that a thread has launched has already run."""
        return _Behind()

    def beside_computation(self, after: Fence) -> AbstractContextManager[None]:
        """Copies run in the calling thread, concurrently with other threads."""
        return nullcontext()


def host_memory(cgroup: Cgroup) -> Memory:
    """The memory that this process may use: what the machine has available, within the tightest cgroup limit."""
    machine = psutil.virtual_memory()
    limit = cgroup.memory_limit()
    if limit is None:
        return Memory(machine.available, machine.total)
    return Memory(min(machine.available, max(0, limit.limit - limit.used)), min(machine.total, limit.limit))


def cpu_model(cpuinfo: Path) -> str | None:
    """The first `model name` line of a cpuinfo file, None if there is none (such as on Arm)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None  # not Linux
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
