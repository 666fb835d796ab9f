"""Doctor's section on the machine: the device that was chosen, its memory, CPU threads, huge pages and matrix unit."""

from collections.abc import Iterator

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.device.cores import Cores, find_cores
from vllm_gaudi_ucm.device.detect import gaudi_cards

SECTION = "device"
GIB = 1 << 30
# Below this the demo model (0.5 GiB in float32), its KV cache and torch itself do not fit.
LITTLE_MEMORY = 2 * GIB


def device_checks(kind: str) -> Iterator[Check]:
    """Rows on the chosen device. A card is started by this, as serving would."""
    device = get_device(kind)
    yield Check(SECTION, "device", "ok", f"{kind} ({device.name()})")
    if kind == "hpu":
        yield _cards()
    free, total = device.memory()
    status: Status = "ok" if free >= LITTLE_MEMORY else "warn"
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    advice = "" if status == "ok" else "end other processes, or raise the container's limit"
    yield Check(SECTION, "memory", status, found, f"{LITTLE_MEMORY / GIB:.0f} GiB free or more", advice)


def thread_checks() -> Iterator[Check]:
    """Rows on cores, threads and huge pages of the host."""
    import torch

    cores = find_cores()
    yield _cores(cores)
    yield _threads(torch.get_num_threads(), cores.usable)
    huge = envs.observed("THP_MEM_ALLOC_ENABLE")
    advice = "" if huge == "1" else "THP_MEM_ALLOC_ENABLE=1 makes large CPU tensors faster"
    yield Check(SECTION, "THP_MEM_ALLOC_ENABLE", "info", "unset" if huge is None else repr(huge), advice=advice)


def matrix_unit_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """A row for a server on the CPU: whether float32 is multiplied on its matrix unit. May build the kernels."""
    from vllm_gaudi_ucm.ops.native import matrix_unit

    if device != "cpu":
        return
    wanted, why_not = config.cpu.matrix_unit, matrix_unit.why_not()
    if why_not:
        yield Check(SECTION, "matrix unit", "info", f"not used: {why_not}")
    elif wanted:
        yield Check(SECTION, "matrix unit", "ok", "used for float32, as sums of bfloat16")
    else:
        yield Check(SECTION, "matrix unit", "info", "there, but ucm.cpu.matrix_unit is false", "true")


def _cards() -> Check:
    cards = gaudi_cards()
    if cards:
        return Check(SECTION, "Gaudi cards", "ok", ", ".join(cards))
    advice = "load the habanalabs driver, or pass the card into the container"
    return Check(SECTION, "Gaudi cards", "warn", "no device node", "/dev/accel/accel0 or /dev/hl0", advice)


def _cores(cores: Cores) -> Check:
    quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
    found = f"{cores.usable} usable: {cores.machine} in the machine, {cores.affinity} by affinity, {quota}"
    return Check(SECTION, "cores", "info", found)


def _threads(threads: int, usable: int) -> Check:
    omp = envs.observed("OMP_NUM_THREADS")
    found = f"torch uses {threads}, OMP_NUM_THREADS is {'unset' if omp is None else repr(omp)}"
    if threads <= usable:
        return Check(SECTION, "threads", "ok", found, f"at most {usable}")
    advice = f"set OMP_NUM_THREADS={usable} or ucm.cpu.threads: {usable}; more threads than cores slow each other down"
    return Check(SECTION, "threads", "warn", found, f"at most {usable}", advice)
