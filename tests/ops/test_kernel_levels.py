"""Portable builds of the native kernels: which level a CPU takes, that every level compiles, and who loads it."""

from __future__ import annotations

import logging
import platform
import shutil
from pathlib import Path

import pytest

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.ops.cpu.native import build, levels, library

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are of x86-64")

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BFLOAT16 = AVX512 | {"avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    ("there", "highest"),
    [
        ({"sse4_2"}, None),
        (AVX2, "x86-64-v3"),
        (AVX512, "x86-64-v4"),
        (BFLOAT16, "avx512-bf16"),
        (BFLOAT16 | {"amx_tile", "amx_bf16", "amx_int8"}, "amx"),
        # a virtual machine may hide what lies below
        (AVX512 | {"amx_tile", "amx_bf16"}, "x86-64-v4"),
        (BFLOAT16 - {"fma"}, None),
    ],
)
def test_a_cpu_takes_the_highest_level_that_it_can_run(there: set[str], highest: str | None) -> None:
    found = levels.runnable(frozenset(there))
    assert (found[-1].name if found else None) == highest


def test_instructions_are_those_of_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 fma")
    assert levels.instructions() == {"fpu", "avx2", "fma"}
    monkeypatch.setattr(build, "cpu_features", lambda: "Features\t: fp asimd")
    assert levels.instructions() == frozenset()


def test_the_best_library_that_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "instructions", lambda: frozenset(BFLOAT16))
    assert levels.find_level(tmp_path / "none") is None
    assert levels.find_level(tmp_path) is None
    (tmp_path / "kernels-amx.so").touch()
    assert levels.find_level(tmp_path) is None
    (tmp_path / "kernels-x86-64-v3.so").touch()
    found = levels.find_level(tmp_path)
    assert found is not None
    assert found[1] == tmp_path / "kernels-x86-64-v3.so"
    (tmp_path / "kernels-avx512-bf16.so").touch()
    found = levels.find_level(tmp_path)
    assert found is not None
    assert found[0].name == "avx512-bf16"


@needs_compiler
@on_x86
@pytest.mark.slow
def test_the_compiler_knows_the_highest_level(tmp_path: Path) -> None:
    """It has the instructions of all levels, most of which this CPU may lack; code is made by `make release`."""
    level = levels.LEVELS[-1]
    compiles, _ = build.commands(build.find_compiler(), tmp_path, tmp_path / level.file, level.march)
    build.run_compilers([[*command, "-fsyntax-only", "-Wno-psabi"] for command in compiles], tmp_path)


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with every kernel, which is compiled in no time and computes nothing."""
    folder = tmp_path / "source"
    folder.mkdir()
    kernels = "\n".join(f'extern "C" long {name}() {{ return 0; }}' for name in library._SIGNATURES)
    (folder / "stubs.cpp").write_text(f"// {Path(__file__).name}\n{kernels}\n")
    monkeypatch.setattr(build, "SOURCE", folder)
    return folder


@pytest.fixture
def portable(tmp_path: Path, stubs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a wheel has brought for this CPU; nothing is loaded yet, and the user's cache is empty."""
    folder = tmp_path / "portable"
    levels.build_levels(folder, levels.runnable())
    monkeypatch.setattr(levels, "PORTABLE", folder)
    monkeypatch.setattr(library, "_outcome", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(envs.KERNELS, raising=False)
    return folder


needs_level = pytest.mark.skipif(not levels.runnable(), reason="this CPU is below every level")


@needs_compiler
@needs_level
def test_the_wheels_library_is_loaded_without_a_compiler(
    portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert library.native() is not None, library.why_not_native()
    assert library.origin() == f"from the wheel, for {levels.runnable()[-1].name} CPUs"
    assert library.why_not_kept() == ""
    assert not (tmp_path / "cache").exists()


@needs_compiler
@needs_level
def test_a_user_who_builds_gets_what_was_built(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.KERNELS, "build")
    assert library.native() is not None, library.why_not_native()
    assert library.origin() == "built here, for this CPU"


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_outcome", None)
    monkeypatch.setenv(envs.KERNELS, "native")
    with pytest.raises(ValueError, match=r"VLLM_GAUDI_UCM_KERNELS: found 'native', expected one of auto, build"):
        library.native()


@needs_compiler
@needs_level
def test_a_library_that_cannot_be_loaded_is_built_instead(portable: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in portable.iterdir():
        file.write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert library.native() is not None, library.why_not_native()
    assert library.origin() == "built here, for this CPU"
    assert "of the wheel cannot be loaded" in caplog.text
    assert str(portable) in caplog.text


@needs_compiler
@needs_level
def test_measured_times_know_the_cpu(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a cache have the same wheel, and other times."""
    before = library.identity()
    monkeypatch.setattr(library, "cpu_features", lambda: "another CPU")
    assert library.identity() != before


@needs_compiler
@needs_level
def test_libraries_say_nothing_of_the_machine(portable: Path, tmp_path: Path, stubs: Path) -> None:
    """The same source is the same library, wherever it is compiled."""
    again = tmp_path / "elsewhere" / "portable"
    made = levels.build_levels(again, levels.runnable())
    for path in made:
        content = path.read_bytes()
        assert content == (portable / path.name).read_bytes()
        assert str(tmp_path).encode() not in content
        assert path.stat().st_mode & 0o777 == 0o755
