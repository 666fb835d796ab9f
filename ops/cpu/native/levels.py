"""Portable builds of the kernels: one library for each level of x86-64 CPUs. A wheel contains them all; a process loads
the highest that its CPU can run.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_gaudi_ucm.ops.cpu.native import build

PORTABLE = Path(__file__).with_name("portable")
"""The libraries of an installed wheel. The folder is missing in a clone, and if the wheel was built without a
compiler.
"""


@dataclass(frozen=True)
class Level:
    """CPUs with the same instructions.

    march: the compiler's flags. adds: instructions that the level below lacks, as /proc/cpuinfo names them.
    """

    name: str
    march: tuple[str, ...]
    adds: frozenset[str]

    @property
    def file(self) -> str:
        return f"kernels-{self.name}.so"


_V4 = "-march=x86-64-v4"
_BFLOAT16 = ("-mavx512vnni", "-mavx512bf16")
_TILES = ("-mamx-tile", "-mamx-bf16")
LEVELS = (
    # AVX2: AMD Zen 1 to 3, Intel Haswell and later
    Level("x86-64-v3", ("-march=x86-64-v3",), frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
    # AVX-512: Intel Skylake-SP
    Level("x86-64-v4", (_V4,), frozenset({f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")})),
    # products of bfloat16 and of int8: AMD Zen 4, Intel Cooper Lake
    Level("avx512-bf16", (_V4, *_BFLOAT16), frozenset({"avx512_vnni", "avx512_bf16"})),
    # the matrix unit: Intel Sapphire Rapids
    Level("amx", (_V4, *_BFLOAT16, *_TILES), frozenset({"amx_tile", "amx_bf16"})),
)
"""The levels, lowest first; each has the instructions of the one before it."""


def instructions() -> frozenset[str]:
    """Returns the instructions that this CPU and its Linux can run, from /proc/cpuinfo; empty if it does not tell."""
    lines = (line.partition(":") for line in build.cpu_features().splitlines())
    return next((frozenset(words.split()) for name, _, words in lines if name.strip() == "flags"), frozenset())


def runnable(there: frozenset[str] | None = None) -> tuple[Level, ...]:
    """The levels that a CPU with these instructions (default: this one) can run, lowest first."""
    there = instructions() if there is None else there
    count = next((place for place, level in enumerate(LEVELS) if not level.adds <= there), len(LEVELS))
    return LEVELS[:count]


def find_level(folder: Path | None = None) -> tuple[Level, Path] | None:
    """The highest level that this CPU can run and that the wheel contains, and its library. folder: for tests."""
    folder = folder or PORTABLE
    if not folder.is_dir():
        return None
    found = ((level, folder / level.file) for level in reversed(runnable()))
    return next(((level, path) for level, path in found if path.is_file()), None)


def why_not_buildable() -> str:
    """Returns why no level can be built on this machine, in words; empty if a compiler that knows them could."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"portable kernels are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    try:
        build.find_compiler()
    except build.BuildError as error:
        return str(error)
    return ""


def build_levels(folder: Path, levels: Sequence[Level] = LEVELS) -> list[Path]:
    """Compiles these levels into a folder, up to four compilers at once: some 100 CPU seconds for all.

    The libraries reveal nothing about the machine: no symbol tables, no paths, file modes for every user.

    Raises BuildError if there is no compiler, or it fails.
    """
    compiler = build.find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-gaudi-ucm-") as made:
        work = Path(made)
        links = []
        compiles = []
        for level in levels:
            (work / level.name).mkdir()
            compile_level, link = build.commands(compiler, work / level.name, folder / level.file, level.march)
            compiles += compile_level
            links.append([*link, "-s", "-Wl,--build-id=none"])
        build.run_compilers(compiles, work)
        build.run_compilers(links, work)
    paths = [folder / level.file for level in levels]
    for path in paths:
        os.chmod(path, 0o755)
    return paths
