"""A pytest plugin: the native kernels as they are built for other CPUs, in place of those of this machine.

`XDG_CACHE_HOME=/tmp/variants python -m pytest -p tests.ops.native_variant --native-variant x86-64-v2 tests/ops/...`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_gaudi_ucm.ops.cpu.native import build, levels, library

EMULATED_TILES = Path(__file__).with_name("emulated_tiles.h")


@dataclass(frozen=True)
class Variant:
    """Another build.

    march: the compiler's flags for the CPU. needs: what /proc/cpuinfo calls the instructions that must be there to run
    it. lanes: floats of a vector. flags, link_flags: further flags of the compiler and the linker.
    """

    march: tuple[str, ...]
    needs: frozenset[str]
    lanes: int
    flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()


# It traps and prints nothing, which is much less to compile; without the last flag it says what was done, and where.
_SANITIZED = ("-Og", "-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-fsanitize-undefined-trap-on-error")


def _of_level(name: str) -> Variant:
    """The build that a wheel brings for a level of CPUs."""
    place = next(place for place, level in enumerate(levels.LEVELS) if level.name == name)
    needs = frozenset().union(*(level.adds for level in levels.LEVELS[: place + 1]))
    return Variant(levels.LEVELS[place].march, needs, 16 if "avx512f" in needs else 8)


VARIANTS = {
    "x86-64-v2": Variant(("-march=x86-64-v2",), frozenset({"sse4_2", "ssse3", "popcnt"}), 4),
    **{level.name: _of_level(level.name) for level in levels.LEVELS},
    # the matrix unit's kernels; what they do beyond the language ends the process
    "emulated-tiles": Variant(
        ("-march=native",),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        16,
        (*_SANITIZED, f"-I{build.SOURCE}", f'-DUCM_EMULATED_TILES="{EMULATED_TILES}"'),
        _SANITIZED,
    ),
}


def why_not(variant: Variant) -> str:
    """Why this machine cannot run a variant, in words; empty where it can."""
    missing = sorted(variant.needs - levels.instructions())
    return f"this CPU has no {', '.join(missing)}" if missing else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-variant", choices=tuple(VARIANTS), help="build of the native kernels to run tests with")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, which ask for the kernels then."""
    variant = VARIANTS[config.getoption("--native-variant")]
    build.MARCH = (*variant.march, *variant.flags)
    build.LINK_FLAGS = (*build.LINK_FLAGS, *variant.link_flags)
    found = library.native()
    if found is None:
        raise pytest.UsageError(f"no kernels: {library.why_not_native()}")
    assert found.ucm_lanes() == variant.lanes
