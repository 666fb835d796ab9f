"""Builds and environments that the packaging tests share; each is made once."""

import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.packaging.source_tree import copy_source, pip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", help="the wheel that test_clean_install.py installs (default: it builds one)")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the build's inputs."""
    return copy_source(tmp_path_factory.mktemp("source") / "vllm-gaudi-ucm")


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network from the copy, and without a compiler: it has no native kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = {**os.environ, "PATH": str(tmp_path_factory.mktemp("empty-path"))}
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    pip("wheel", *options, str(source), cwd=folder, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def tools_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the developer tools."""
    folder = tmp_path_factory.mktemp("tools-wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source / "tools"), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def make_environment(folder: Path) -> Path:
    """A new virtual environment that sees this one's distributions (pip, torch, vLLM) but not its editable install.

    A `.pth` file adds a folder to the path without processing the `.pth` files in it, and ours is one of those.

    Returns:
        Its interpreter.
    """
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    # several, if this environment borrows from another
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (own / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def plain_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment without this package, which a caller gives on `PYTHONPATH`."""
    return make_environment(tmp_path_factory.mktemp("plain-environment"))


@pytest.fixture(scope="session")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("wheel-environment")
    python = make_environment(folder)
    pip("install", "--no-deps", "--no-index", "--ignore-installed", str(wheel), cwd=folder, python=python)
    return python


@pytest.fixture(scope="session")
def editable_python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the copy installed as editable."""
    folder = tmp_path_factory.mktemp("editable-environment")
    python = make_environment(folder)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    pip("install", *options, "--editable", str(source), cwd=folder, python=python)
    return python
