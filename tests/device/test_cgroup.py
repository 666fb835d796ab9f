"""Container limits: cgroup v1 and v2, at any level above the process."""

import os
from pathlib import Path

import pytest

from vllm_gaudi_ucm.device import host_limits
from vllm_gaudi_ucm.device.cpu import host_memory
from vllm_gaudi_ucm.device.host_limits import Cgroup, Cores, MemoryLimit, find_cores

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


def tree(root: Path, files: dict[str, str | int]) -> Cgroup:
    """A file system with these files, as the cgroups of a process."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return Cgroup(root)


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert Cgroup(tmp_path).memory_limit() is None
    assert Cgroup(tmp_path).cpu_quota() is None


def test_v2_takes_the_tightest_level(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    cgroup = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            f"{base}/pod/box/memory.max": "max",
            f"{base}/pod/box/memory.current": 10 * MIB,
            f"{base}/pod/memory.max": 100 * MIB,
            f"{base}/pod/memory.current": 70 * MIB,
            f"{base}/pod/memory.stat": f"anon 5\ninactive_file {20 * MIB}",
            f"{base}/pod/box/cpu.max": "150000 100000",
            f"{base}/pod/cpu.max": "max 100000",
        },
    )
    assert cgroup.memory_limit() == MemoryLimit(100 * MIB, 50 * MIB)
    assert cgroup.cpu_quota() == 1.5


def test_v2_in_a_container_that_hides_its_path(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/cgroup": "0::/host/path/elsewhere",
        "sys/fs/cgroup/memory.max": 64 * MIB,
        "sys/fs/cgroup/memory.current": 4 * MIB,
    }
    assert tree(tmp_path, files).memory_limit() == MemoryLimit(64 * MIB, 4 * MIB)


def test_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    cgroup = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n0::/",
            f"{base}/memory/memory.limit_in_bytes": UNLIMITED_V1,
            f"{base}/memory/box/memory.limit_in_bytes": 32 * MIB,
            f"{base}/memory/box/memory.usage_in_bytes": 8 * MIB,
            f"{base}/cpu/box/cpu.cfs_quota_us": 400000,
            f"{base}/cpu/box/cpu.cfs_period_us": 100000,
            f"{base}/cpu/cpu.cfs_quota_us": -1,
            f"{base}/cpu/cpu.cfs_period_us": 100000,
        },
    )
    assert cgroup.memory_limit() == MemoryLimit(32 * MIB, 8 * MIB)
    assert cgroup.cpu_quota() == 4.0


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    plain = host_memory(Cgroup(tmp_path))
    assert 0 < plain.free <= plain.total
    files: dict[str, str | int] = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 64 * MIB,
        "sys/fs/cgroup/memory.current": 60 * MIB,
    }
    assert host_memory(tree(tmp_path, files)) == (4 * MIB, 64 * MIB)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(70 * MIB))
    assert host_memory(Cgroup(tmp_path)) == (0, 64 * MIB)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(plain.total * 2))
    assert host_memory(Cgroup(tmp_path)).total == plain.total


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.2, 1), (1.5, 2), (64.0, 4)])
def test_usable_cores(quota: float | None, usable: int) -> None:
    assert Cores(machine=8, affinity=4, quota=quota).usable == usable


def test_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = find_cores(Cgroup(tmp_path))
    assert cores.affinity == len(os.sched_getaffinity(0)) <= cores.machine
    assert cores.quota is None
    monkeypatch.delattr(host_limits.os, "sched_getaffinity")
    assert find_cores(Cgroup(tmp_path)).affinity == cores.machine
