"""CPU cores that this process may use, after its affinity and its container's quota."""

import math
import os
from dataclasses import dataclass

from vllm_gaudi_ucm.device.cgroup import Cgroup


@dataclass(frozen=True)
class Cores:
    """Core counts of the machine (`machine`), of this process's affinity, and its CPU-time quota in cores."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """How many threads can compute at once; more threads than that slow each other down."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


def find_cores(cgroup: Cgroup | None = None) -> Cores:
    """Reads the core counts of this process."""
    machine = os.cpu_count() or 1
    # Affinity does not exist outside Linux.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, affinity, (cgroup or Cgroup()).cpu_quota())
