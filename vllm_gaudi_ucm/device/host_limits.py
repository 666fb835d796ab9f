"""The memory and cores that the system, including cgroups, lets this process use."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_V1_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit above this process, in bytes."""

    limit: int
    used: int


@dataclass(frozen=True)
class Cgroup:
    """The cgroups of this process. `root` is another file system's root in tests."""

    root: Path = Path("/")

    def memory_limit(self) -> MemoryLimit | None:
        """The limit with the least room left, among this process's cgroup and all above it; None without a limit."""
        limits = [limit for folder in self._folders("memory") if (limit := _memory_limit(folder)) is not None]
        return min(limits, key=lambda limit: limit.limit - limit.used, default=None)

    def cpu_quota(self) -> float | None:
        """CPU time per time (1.5 = one and a half cores) that this process may use, None without a limit."""
        quotas = [quota for folder in self._folders("cpu") if (quota := _cpu_quota(folder)) is not None]
        return min(quotas, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The cgroup folders that govern a controller, this process's own first, then each one above."""
        mount = self.root / "sys/fs/cgroup"
        for hierarchy, controllers, path in self._memberships():
            if controllers == "" and hierarchy == "0":
                base = mount
            elif controller in controllers.split(","):
                base = mount / controller
            else:
                continue
            own = base / path.lstrip("/")
            # In a container the path may be the host's, which is not visible: the mount itself is then our cgroup.
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir())

    def _memberships(self) -> Iterator[tuple[str, str, str]]:
        text = _read(self.root / "proc/self/cgroup") or ""
        for line in text.splitlines():
            hierarchy, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            yield hierarchy, controllers, path


def _memory_limit(folder: Path) -> MemoryLimit | None:
    limit = _number(folder / "memory.max")
    used = _number(folder / "memory.current")
    if limit is None:
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or limit >= _V1_UNLIMITED:
        return None
    # File pages the kernel would drop under pressure are counted as used, but are free to us.
    return MemoryLimit(limit, max(0, (used or 0) - _inactive_file(folder)))


def _inactive_file(folder: Path) -> int:
    fields = dict(line.split(maxsplit=1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us") or ""
        period = _read(folder / "cpu.cfs_period_us") or ""
    if not quota.isdigit() or not period.isdigit():  # "max" (v2) and "-1" (v1) say: no limit
        return None
    return int(quota) / int(period) if int(period) else None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None  # this kernel has no such file: no limit of that kind


@dataclass(frozen=True)
class Cores:
    """Core counts of the machine (`machine`), of this process's affinity, and its CPU-time quota in cores."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Returns how many threads can compute at once; more threads would slow each other down."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


def find_cores(cgroup: Cgroup | None = None) -> Cores:
    """Reads the core counts of this process."""
    machine = os.cpu_count() or 1
    # Affinity does not exist outside Linux.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, affinity, (cgroup or Cgroup()).cpu_quota())
