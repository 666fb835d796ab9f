"""The wheel as a user has it: installed in a clean environment, without a compiler, run by an ordinary user.

`--wheel dist/NAME.whl` tests a wheel that is there, as `make release` does; without it one is built, with the kernels
of this CPU alone.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.conftest import make_environment
from tests.packaging.source_tree import ROOT, pip
from tests.text_model import make_text_model
from vllm_gaudi_ucm.ops.cpu.native import build, levels
from vllm_gaudi_ucm_tools.demo.model import DEFAULT_OUTPUT

NOBODY = 65534
FOLDER = "vllm_gaudi_ucm/ops/cpu/native/portable"

pytestmark = [
    pytest.mark.slow,  # compiles kernels, and starts an engine
    pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels have kernels for x86-64 alone"),
    pytest.mark.skipif(not levels.runnable(), reason="this CPU is below every level of the kernels"),
]


@pytest.fixture(scope="module")
def kernel_wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with native kernels."""
    given: str | None = request.config.getoption("--wheel", None)
    if given:
        return Path(given).resolve()
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernel-wheel")
    option = f"--config-settings=--build-option=--kernel-levels={levels.runnable()[-1].name}"
    source = str(request.getfixturevalue("source"))
    pip("wheel", "--no-deps", "--no-build-isolation", option, "--wheel-dir", str(folder), source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class Install:
    """A clean environment and an ordinary user in it.

    python: the environment's. home: the user's, empty at first. model: a tiny one that speaks.
    """

    python: Path
    home: Path
    model: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment, with its programs alone on PATH."""
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        environment = {"HOME": str(self.home), "PATH": str(self.python.parent), "OMP_NUM_THREADS": "1"}
        own = {"VLLM_GAUDI_UCM_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        return subprocess.run(
            [str(self.python.parent / command[0]), *command[1:]],
            cwd=self.home,
            env={**environment, **own},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            **user,  # type: ignore[call-overload]
        )


def why_no_ordinary_user() -> str:
    """Why a user without rights cannot run programs of this environment here, in words; empty if one can."""
    packages = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    for folder in (*packages, Path(sys.executable)):
        for above in (folder.resolve(), *folder.resolve().parents):
            if not above.stat().st_mode & 0o001:
                return f"{above} is closed to ordinary users, and this one is root"
    if os.stat(os.devnull).st_mode & 0o006 != 0o006:
        return f"{os.devnull} is closed to ordinary users: chmod 666 {os.devnull}"
    return ""


@pytest.fixture(scope="module")
def install(kernel_wheel: Path, tools_wheel: Path) -> Iterator[Install]:
    if os.getuid() == 0 and (reason := why_no_ordinary_user()):
        pytest.skip(reason)
    # not pytest's folders, which are its user's alone
    folder = Path(tempfile.mkdtemp(prefix="gaudi-ucm-install-"))
    try:
        folder.chmod(0o755)
        python = make_environment(folder / "environment")
        options = ("--no-deps", "--no-index", "--ignore-installed")
        pip("install", *options, str(kernel_wheel), str(tools_wheel), cwd=folder, python=python)
        model = make_text_model(ROOT / DEFAULT_OUTPUT, folder / "model")
        subprocess.run(["chmod", "-R", "a-w,a+rX", str(folder / "environment"), str(model)], check=True)
        home = folder / "home"
        home.mkdir(mode=0o700)
        if os.getuid() == 0:
            os.chown(home, NOBODY, NOBODY)
        yield Install(python, home, model)
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=False)
        shutil.rmtree(folder)


def test_the_wheel_is_for_its_platform_and_every_python(kernel_wheel: Path) -> None:
    _, tags = kernel_wheel.stem.split("-py3-none-")
    assert all(tag.endswith("x86_64") for tag in tags.split("."))
    with zipfile.ZipFile(kernel_wheel) as archive:
        libraries = {name for name in archive.namelist() if name.endswith(".so")}
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(about).decode()
    assert f"{FOLDER}/{levels.runnable()[-1].file}" in libraries
    assert libraries <= {f"{FOLDER}/{level.file}" for level in levels.LEVELS}


def test_the_command_says_the_version_of_the_wheel(install: Install, kernel_wheel: Path) -> None:
    done = install.run("gaudi-ucm", "--version")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"vllm-gaudi-ucm {kernel_wheel.name.split('-')[1]}\n"


def test_doctor_finds_the_fast_path_on_cpus_of_each_level(install: Install) -> None:
    """A CPU of a lower level is this one without the libraries above: a process takes the highest that is there."""
    (folder,) = install.python.parent.parent.glob(f"lib/python*/site-packages/{FOLDER}")
    there = [level for level in levels.runnable() if (folder / level.file).is_file()]
    assert there[-1] == levels.runnable()[-1]
    with writable(folder):
        for level in reversed(there):
            done = install.run("gaudi-ucm", "doctor", "--json")
            assert done.returncode == 0, done.stdout + done.stderr
            rows = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
            kernels = rows["native kernels"]
            assert (kernels["status"], kernels["found"]) == ("ok", f"from the wheel, for {level.name} CPUs")
            assert rows["unified_attention"]["found"].startswith("native;")
            (folder / level.file).rename(folder / f"{level.file}.away")


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Lets this process rename the files of a folder, which have their names back afterwards."""
    folder.chmod(0o755)
    try:
        yield
    finally:
        for path in folder.glob("*.away"):
            path.rename(path.with_suffix(""))
        folder.chmod(0o555)


def test_the_demo_runs(install: Install) -> None:
    done = install.run("gaudi-ucm", "demo", "--model", str(install.model), "--requests", "4", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert len(result["answers"]) == 4
    assert "Native CPU kernels" not in done.stderr


def test_the_user_built_nothing(install: Install) -> None:
    """It follows the tests above, which would have left a library in the user's cache."""
    assert not list(install.home.rglob("kernels-*.so"))
