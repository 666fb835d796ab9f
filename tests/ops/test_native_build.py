"""The build of the native kernels: cached, keyed, safe to load, and its absence explained."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from vllm_gaudi_ucm.ops.cpu.native import build, library
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, UniquePart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

pytestmark = pytest.mark.slow  # builds kernels

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
PARTS = AttentionParts(unique=UniquePart(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]), torch.tensor([2]), 1))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@needs_compiler
def test_builds_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source that is compiled in no time; `test_native_variants.py` builds the kernels."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("one", "two"):
        (source / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
    monkeypatch.setattr(build, "SOURCE", source)
    first = build.build(cache)
    assert [path.name for path in cache.iterdir()] == [first.name], "nothing but the library is left"
    monkeypatch.setattr(build, "run_compilers", lambda commands, work: pytest.fail(f"compiled again: {commands}"))
    assert build.build(cache) == first


@needs_compiler
@pytest.mark.parametrize("change", ["source", "flags", "cpu"])
def test_what_decides_the_code_decides_the_key(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = build.find_compiler()
    before = build._key(found)
    assert build._key(found) == before
    if change == "source":
        shutil.copytree(build.SOURCE, tmp_path / "source")
        (tmp_path / "source" / "vector.h").write_text("// another\n")
        monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O2"))
    else:
        monkeypatch.setattr(build, "cpu_features", lambda: "another CPU")
    assert build._key(found) != before


@needs_compiler
@pytest.mark.parametrize("left", ["__pycache__", "folder.cpp", ".#vector.h", "notes.txt"])
def test_what_an_editor_leaves_beside_the_source_is_no_source(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build.SOURCE, tmp_path / "source")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    found = build.find_compiler()
    before = build._key(found)
    if left.startswith(".#"):
        (tmp_path / "source" / left).symlink_to("nobody@nowhere")
    elif left == "notes.txt":
        (tmp_path / "source" / left).touch()
    else:
        (tmp_path / "source" / left).mkdir()
    assert build._key(found) == before


@needs_compiler
def test_a_wrapper_around_another_compiler_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ccache's, which stays while the compiler behind it is replaced."""
    version = tmp_path / "version"
    wrapper = tmp_path / "g++"
    wrapper.write_text(f"#!/bin/sh\ncat {version}\n")
    wrapper.chmod(0o755)
    keys = set()
    for text in ("12.2", "13.1"):
        version.write_text(text)
        keys.add(build._key(str(wrapper)))
    assert len(keys) == 2


@needs_compiler
@pytest.mark.parametrize("variable", ["CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"])
def test_variables_of_the_compiler_change_nothing(
    variable: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header, or an assembler, that stands in for the machine's own would be compiled under the same key."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text("#include <cstdint>\nint64_t one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cstdint").write_text("#error another header\n")
    for part in ("as", "ld", "cc1plus"):
        (tmp_path / "other" / part).write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / "other" / part).chmod(0o755)
    plain = build.build(cache).read_bytes()
    monkeypatch.setenv(variable, f"{tmp_path}/other/")
    monkeypatch.setenv("LD_RUN_PATH", str(tmp_path))
    monkeypatch.setenv("DEPENDENCIES_OUTPUT", str(tmp_path / "written"))
    (library,) = cache.iterdir()
    library.unlink()
    assert build.build(cache) == library
    assert library.read_bytes() == plain
    assert not (tmp_path / "written").exists()


@needs_compiler
def test_a_compiler_that_fails_ends_the_others(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    command = ["/bin/sh", "-c", "exec sleep 60"]
    begin = time.monotonic()
    with pytest.raises(build.BuildError, match="/bin/sh failed: broken"):
        build.run_compilers([command, ["/bin/sh", "-c", "echo broken >&2; exit 1"]], tmp_path)
    assert time.monotonic() - begin < 30
    monkeypatch.setattr(build, "TIMEOUT_S", 0.1)
    with pytest.raises(build.BuildError, match="/bin/sh did not finish"):
        build.run_compilers([command], tmp_path)


@needs_compiler
def test_a_form_without_scales_has_none_in_any_panel(tmp_path: Path) -> None:
    """A constant expression may not count on from a null pointer: sanitizers of GCC do not see it."""
    (tmp_path / "panels.cpp").write_text(f"""
#include "{build.SOURCE / "compact_linear.cpp"}"
constexpr uint8_t codes[2 * 32 * 16 * 2] = {{}};
constexpr Codes whole{{codes, nullptr, nullptr}}, second = panel_of<BFloat16>(whole, 1, 32, 16);
static_assert(second.codes == codes + 32 * 16 * 2 && !second.scales && !second.offsets);
""")
    flags = [*(flag for flag in build.FLAGS if not flag.startswith("-O")), *build.MARCH]
    build.run_compilers([[build.find_compiler(), *flags, "-fsyntax-only", str(tmp_path / "panels.cpp")]], tmp_path)


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: none of g\+\+, c\+\+"):
        build.build(cache)


@needs_compiler
def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken.cpp").write_text("this is no program\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    with pytest.raises(build.BuildError, match=r"failed: .*broken\.cpp"):
        build.build(cache)
    assert not list(cache.iterdir())


@needs_compiler
def test_a_folder_that_others_may_write_to_is_refused(cache: Path) -> None:
    """What lies there would be loaded into the engine."""
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(build.BuildError, match="others may write to it"):
        build.build(cache)


def test_without_kernels_auto_is_torch_and_native_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _attend(prepare(PARTS, 2, implementation="cpu"))
    monkeypatch.setattr(library, "_outcome", None)
    monkeypatch.setattr(library, "build", _no_build)
    assert library.why_not_native() == "no compiler in this test"
    with ATTENTION.scope():
        ready = prepare(PARTS, 2)
        assert ready.implementation.name == "cpu"
        assert torch.equal(_attend(ready), expected)
        with pytest.raises(ValueError, match=r"'native' cannot be used here \(no compiler in this test\)"):
            prepare(PARTS, 2, implementation="native")


def test_threads_that_ask_at_once_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(library, "_outcome", None)
    monkeypatch.setattr(library, "_load", lambda: calls.append(1) or library._Outcome(None, "once"))
    threads = [threading.Thread(target=library.native) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def _no_build() -> Path:
    raise build.BuildError("no compiler in this test")


def _attend(parts: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 16, generator=generator)
    cache = torch.randn(3, 2, 1, 16, generator=generator)
    new = cache[1, 1:2]
    return unified_attention(query, new, new, cache, cache, parts, AttentionSpec(0.25))  # type: ignore[arg-type]
