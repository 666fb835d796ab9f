"""Doctor's sections on the machine: versions; the device, its memory, CPU threads, huge pages and matrix unit; fused
operators of Gaudi's software."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.device.detect import gaudi_cards
from vllm_gaudi_ucm.device.gaudi_software import RELEASES, GaudiSoftware, installed_gaudi_software, minor_version
from vllm_gaudi_ucm.device.host_limits import Cores, find_cores
from vllm_gaudi_ucm.device.hpu_mode import HpuMode, hpu_mode
from vllm_gaudi_ucm.ops.registry import AUTO, has_folders
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.vllm_api.versions import BUILT_FOR_TORCH, WINDOWS, VersionWindow, installed_version

DEVICE = "device"
OPERATORS = "operators"
GIB = 1 << 30
# Below this the demo model (0.5 GiB in float32), its KV cache and torch itself do not fit.
LITTLE_MEMORY = 2 * GIB
# Computations for which Gaudi's software has no fused operator.
UNFUSED = {
    "gate, silu(x) * y": "torch's operators; Gaudi's software has no fused one",
    "softmax of partials": "torch's operators, in float32; the fused ones round its statistics",
}


def device_checks(kind: str) -> Iterator[Check]:
    """Rows on the chosen device. A card is started by this, as serving would."""
    device = get_device(kind)
    if kind == "hpu":
        # before the card is started, which the bridge refuses in a mode that it does not have
        yield hpu_mode_check(hpu_mode())
    yield Check(DEVICE, "device", "ok", f"{kind} ({device.name()})")
    if kind == "hpu":
        yield _cards()
    free, total = device.memory()
    status: Status = "ok" if free >= LITTLE_MEMORY else "warn"
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    advice = "" if status == "ok" else "end other processes, or raise the container's limit"
    yield Check(DEVICE, "memory", status, found, f"{LITTLE_MEMORY / GIB:.0f} GiB free or more", advice)


def hpu_mode_check(mode: HpuMode) -> Check:
    """Checks Gaudi's execution mode, the build of torch, and the consequences of both."""
    name, expected = "PT_HPU_LAZY_MODE", "unset or 0: eager with torch.compile"
    problem = mode.problem()
    if problem is not None:
        return Check(DEVICE, name, "fail", problem, expected, "unset PT_HPU_LAZY_MODE")
    if mode.lazy:
        found = f"{mode}: steps are HPU graphs, and nothing is compiled by torch.compile"
        return Check(DEVICE, name, "warn", found, expected, "the vendor calls lazy mode legacy; unset the variable")
    return Check(DEVICE, name, "ok", f"{mode}: each bucket is compiled once, layer by layer; there are no HPU graphs")


def thread_checks() -> Iterator[Check]:
    """Rows on cores, threads and huge pages of the host."""
    import torch

    cores = find_cores()
    yield _cores(cores)
    yield _threads(torch.get_num_threads(), cores.usable)
    huge = envs.observed("THP_MEM_ALLOC_ENABLE")
    advice = "" if huge == "1" else "THP_MEM_ALLOC_ENABLE=1 makes large CPU tensors faster"
    yield Check(DEVICE, "THP_MEM_ALLOC_ENABLE", "info", "unset" if huge is None else repr(huge), advice=advice)


def matrix_unit_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """A row for a server on the CPU: whether float32 is multiplied on its matrix unit. May build the kernels."""
    if device != "cpu" or not has_folders("cpu"):
        return
    from vllm_gaudi_ucm.ops.cpu.native import matrix_unit

    wanted, why_not = config.cpu.matrix_unit, matrix_unit.why_not()
    if why_not:
        yield Check(DEVICE, "matrix unit", "info", f"not used: {why_not}")
    elif wanted:
        yield Check(DEVICE, "matrix unit", "ok", "used for float32, as sums of bfloat16")
    else:
        yield Check(DEVICE, "matrix unit", "info", "there, but ucm.cpu.matrix_unit is false", "true")


def kernel_checks(device: str | None) -> Iterator[Check]:
    """A row for a server on the CPU: which kernels it has, or why none, and whether they are kept. May build them."""
    if device != "cpu" or not has_folders("cpu"):
        return
    from vllm_gaudi_ucm.ops.cpu.native.build import INSTALL, KEEP
    from vllm_gaudi_ucm.ops.cpu.native.library import origin, why_not_kept, why_not_native

    name, expected = "native kernels", "from a wheel, or built once and kept in the user's cache"
    if found := why_not_native():
        advice = f"{INSTALL}; until then steps take torch's operations, which are slower"
        yield Check(DEVICE, name, "warn", f"none: {found}", expected, advice)
    elif found := why_not_kept():
        advice = f"{KEEP}; until then each process compiles them at its start"
        yield Check(DEVICE, name, "warn", f"built for each process alone: {found}", expected, advice)
    else:
        yield Check(DEVICE, name, "ok", origin(), expected)


def product_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """Rows for a server on the CPU: which way its linear layers are multiplied, as measured on this machine."""
    if device != "cpu" or not has_folders("cpu"):
        return
    from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import known_ways
    from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Way

    known = known_ways()
    if not known:
        yield Check(DEVICE, "linear layers", "info", "not measured yet; the first engine on this machine does that")
    for kind, times in sorted(known.items()):
        # torch's own product is for encoders alone
        unused = {Way.PLAIN, *(() if config.cpu.matrix_unit else (Way.TILES,))}
        ways = [way for way in times.seconds if way not in unused]
        # other programs disturbed the measurement
        found = times.described(ways) if ways else "not measured on a quiet machine yet; a rule chooses"
        yield Check(DEVICE, "linear layers", "info", f"{kind}: {found}")


def implementation_checks(config: UcmConfig, device: str) -> Iterator[Check]:
    """A row for each operation: its implementation at true shapes, and why not others. May build the kernels."""
    from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION
    from vllm_gaudi_ucm.ops.kv_cache.implementation import KV_CACHE
    from vllm_gaudi_ucm.ops.moe.implementation import MOE

    of_attention = config.attention.implementation
    for operations, name in ((ATTENTION, of_attention), (KV_CACHE, AUTO), (BLOCK_SELECTION, AUTO), (MOE, AUTO)):
        row = operations.operation
        try:
            chosen = operations.choose(name, device).name
        except ValueError as error:
            yield Check(DEVICE, row, "fail", str(error), advice="correct ucm.attention.implementation")
            continue
        others = [f"{other}: {why}" for other, why in operations.explain(device).items() if why]
        yield Check(DEVICE, row, "ok", "; ".join((chosen, *others)))


def operator_checks(device: str | None) -> Iterator[Check]:
    """A row for each operator on a Gaudi; none on another device."""
    if device != "hpu" or not has_folders("hpu"):
        return
    # torch takes seconds, which the help of the command need not
    from vllm_gaudi_ucm.ops.hpu.operators import GAUDI_OPERATORS

    for operator in GAUDI_OPERATORS:
        found = operator.resolve()
        if found.call is not None:
            yield Check(OPERATORS, operator.title, "ok", f"fused: {found.why}")
        else:
            advice = "take a release of Gaudi's software that has it; until then steps take longer"
            found_instead = f"{operator.instead}: {found.why}"
            yield Check(OPERATORS, operator.title, "warn", found_instead, operator.signature, advice)
    for title, instead in UNFUSED.items():
        yield Check(OPERATORS, title, "info", instead)


def _cards() -> Check:
    cards = gaudi_cards()
    if cards:
        return Check(DEVICE, "Gaudi cards", "ok", ", ".join(cards))
    advice = "load the habanalabs driver, or pass the card into the container"
    return Check(DEVICE, "Gaudi cards", "warn", "no device node", "/dev/accel/accel0 or /dev/hl0", advice)


def _cores(cores: Cores) -> Check:
    quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
    found = f"{cores.usable} usable: {cores.machine} in the machine, {cores.affinity} by affinity, {quota}"
    return Check(DEVICE, "cores", "info", found)


def _threads(threads: int, usable: int) -> Check:
    omp = envs.observed("OMP_NUM_THREADS")
    found = f"torch uses {threads}, OMP_NUM_THREADS is {'unset' if omp is None else repr(omp)}"
    if threads <= usable:
        return Check(DEVICE, "threads", "ok", found, f"at most {usable}")
    advice = f"set OMP_NUM_THREADS={usable} or ucm.cpu.threads: {usable}; more threads than cores slow each other down"
    return Check(DEVICE, "threads", "warn", found, f"at most {usable}", advice)


VERSIONS = "versions"
DISTRIBUTION = "vllm-gaudi-ucm"


def version_checks() -> Iterator[Check]:
    yield Check(VERSIONS, DISTRIBUTION, "info", installed_version(DISTRIBUTION) or "not installed as a distribution")
    yield _python()
    for window in WINDOWS:
        yield _windowed(window)
    yield from _torch_of_vllm()
    software = installed_gaudi_software()
    if software is not None:
        yield gaudi_software_check(software)
    yield _transformers()
    yield Check(VERSIONS, "triton", "info", installed_version("triton") or "not installed (optional)")


def _python() -> Check:
    found = platform.python_version()
    expected = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    if SpecifierSet(expected).contains(found, prereleases=True):
        return Check(VERSIONS, "Python", "ok", found, expected)
    return Check(VERSIONS, "Python", "fail", found, expected, "make the environment with a supported Python")


def _windowed(window: VersionWindow) -> Check:
    found = installed_version(window.distribution)
    if found is None:
        advice = f"install {window.distribution}; the README says which build"
        return Check(VERSIONS, window.distribution, "fail", "not installed", window.versions, advice)
    if window.holds(found):
        return Check(VERSIONS, window.distribution, "ok", found, window.versions)
    advice = f"install a supported {window.distribution}, or a release of {DISTRIBUTION} that supports {found}"
    if window.distribution == "vllm":
        advice += "; ucm.allow_untested_vllm true starts anyway"
    return Check(VERSIONS, window.distribution, "fail", found, window.versions, advice)


def _torch_of_vllm() -> Iterator[Check]:
    """Yields a row if torch is not the one that the installed vLLM is built for."""
    vllm, torch = installed_version("vllm"), installed_version("torch")
    expected = BUILT_FOR_TORCH.get(minor_version(vllm) or "")
    if expected is None or minor_version(torch) in (None, expected):
        return
    found = f"vLLM {vllm} is built for torch {expected}, and runs with {torch} here"
    pairs = ", ".join(f"vLLM {release} for torch {built_for}" for release, built_for in BUILT_FOR_TORCH.items())
    advice = f"docs/support.md has the pairs that are tested; builds: {pairs}"
    yield Check(VERSIONS, "torch of vLLM", "info", found, f"torch {expected}", advice)


def gaudi_software_check(software: GaudiSoftware) -> Check:
    """The release of Gaudi's software, and whether torch is the one that it ships."""
    known = ", ".join(f"{release} with torch {torch}" for release, torch in RELEASES.items())
    name, expected = "Gaudi software", software.expected_torch
    if expected is None:
        advice = "run `gaudi-ucm first-hour` before you rely on it: no simulated card plays this release"
        return Check(VERSIONS, name, "warn", str(software), known, advice)
    if not software.has_its_torch:
        advice = (
            f"install the torch that comes with Gaudi software {software.release}: its bridge refuses another minor "
            "version when it is imported"
        )
        return Check(VERSIONS, name, "fail", str(software), f"torch {expected}", advice)
    meeting = [release for release, torch in BUILT_FOR_TORCH.items() if torch == expected]
    advice = f"vLLM {' and '.join(meeting)} is built for this torch" if meeting else "no vLLM is built for this torch"
    return Check(VERSIONS, name, "ok", str(software), known, advice)


def _transformers() -> Check:
    """The window of transformers is vLLM's, so it is read from vLLM's own requirements."""
    found = installed_version("transformers")
    expected = _required_by_vllm("transformers")
    if found is None:
        return Check(VERSIONS, "transformers", "fail", "not installed", str(expected), "pip install transformers")
    if expected.contains(found, prereleases=True):
        return Check(VERSIONS, "transformers", "ok", found, str(expected))
    advice = f"pip install 'transformers{expected}': vLLM asks for it"
    return Check(VERSIONS, "transformers", "warn", found, str(expected), advice)


def _required_by_vllm(distribution: str) -> SpecifierSet:
    try:
        requirements = metadata.requires("vllm") or []
    except metadata.PackageNotFoundError:
        return SpecifierSet()  # a missing vLLM has a row of its own
    parsed = (Requirement(text) for text in requirements)
    return next((item.specifier for item in parsed if item.name == distribution), SpecifierSet())
