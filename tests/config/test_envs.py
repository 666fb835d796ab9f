"""Environment variables: the device choice, and vLLM's registry of known variables."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_gaudi_ucm
from vllm_gaudi_ucm import envs

PACKAGE = Path(vllm_gaudi_ucm.__file__).parent
MULTIPROC = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize(
    ("value", "choice"), [(None, "auto"), ("", "auto"), ("cpu", "cpu"), (" HPU ", "hpu"), ("cuda", "cuda")]
)
def test_device_choice(monkeypatch: pytest.MonkeyPatch, value: str | None, choice: str) -> None:
    if value is None:
        monkeypatch.delenv(envs.DEVICE, raising=False)
    else:
        monkeypatch.setenv(envs.DEVICE, value)
    assert envs.device_choice() == choice


def test_unknown_device_names_variable_found_and_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.DEVICE, "gpu")
    with pytest.raises(ValueError, match=r"VLLM_GAUDI_UCM_DEVICE: found 'gpu', expected one of auto, hpu, cuda, cpu"):
        envs.device_choice()


@pytest.mark.parametrize(("value", "choice"), [(None, "auto"), ("", "auto"), (" Build ", "build")])
def test_kernel_choice(monkeypatch: pytest.MonkeyPatch, value: str | None, choice: str) -> None:
    if value is None:
        monkeypatch.delenv(envs.KERNELS, raising=False)
    else:
        monkeypatch.setenv(envs.KERNELS, value)
    assert envs.kernel_choice() == choice


def test_only_declared_variables_can_be_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert envs.observed("OMP_NUM_THREADS") == "3"
    with pytest.raises(KeyError, match="HOME"):
        envs.observed("HOME")


@pytest.mark.parametrize(("value", "names"), [(None, None), ("", ("",)), ("gaudi_ucm,other", ("gaudi_ucm", "other"))])
def test_allowed_plugins_reads_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch, value: str | None, names: tuple[str, ...] | None
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    assert envs.allowed_plugins() == names


def test_only_envs_reads_the_environment() -> None:
    """No other file of the package, its ops or its graphs mentions os.environ or os.getenv."""
    rooms = [PACKAGE, PACKAGE.parent / "ops", PACKAGE.parent / "graphs"]
    readers = set()
    for file in (file for room in rooms for file in room.rglob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        if names & {"environ", "getenv", "putenv"}:
            readers.add(file.relative_to(PACKAGE.parent).as_posix())
    assert readers == {"vllm_gaudi_ucm/envs.py"}


CHECK = """
import sys
from vllm.platforms.interface import Platform
from vllm_gaudi_ucm import envs
if sys.argv[1] == "merge":
    envs.merge_into_vllm()
    envs.merge_into_vllm()
    import vllm.envs
    assert vllm.envs.VLLM_GAUDI_UCM_DEVICE == "cpu"
    assert vllm.envs.VLLM_GAUDI_UCM_KERNELS == "build"
Platform.validate_environ(hard_fail=True)
"""


@pytest.mark.parametrize("merge", [True, False])
def test_merged_variable_is_known_to_vllm(monkeypatch: pytest.MonkeyPatch, merge: bool) -> None:
    """vLLM refuses VLLM_GAUDI_UCM_DEVICE as unknown, unless it was merged into its registry."""
    monkeypatch.setenv(envs.DEVICE, "cpu")
    monkeypatch.setenv(envs.KERNELS, "build")
    command = [sys.executable, "-c", CHECK, "merge" if merge else "plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if merge:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert "Unknown vLLM environment variable detected: VLLM_GAUDI_UCM_DEVICE" in done.stderr


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/a"}, "/a/.cache/vllm-gaudi-ucm"),
        ({"HOME": "/a", "XDG_CACHE_HOME": ""}, "/a/.cache/vllm-gaudi-ucm"),
        ({"HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/b/vllm-gaudi-ucm"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/vllm-gaudi-ucm"),
    ],
)
def test_user_cache(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(envs.user_cache()) == folder


def test_a_cache_that_depends_on_the_working_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    with pytest.raises(RuntimeError, match="XDG_CACHE_HOME: found 'cache', expected the absolute path"):
        envs.user_cache()


@pytest.mark.parametrize(
    ("asked", "overrule", "spawns"),
    [(None, False, True), ("spawn", False, True), ("fork", False, False), ("fork", True, True), (None, True, True)],
)
def test_processes_are_spawned_unless_the_user_forks(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, overrule: bool, spawns: bool
) -> None:
    """covers: F1"""
    # set first: undone then, too, where the function sets it
    monkeypatch.setenv(MULTIPROC, asked or "")
    if asked is None:
        monkeypatch.delenv(MULTIPROC)
    assert envs.spawn_workers(even_if_asked_to_fork=overrule) is spawns
    assert os.environ[MULTIPROC] == ("spawn" if spawns else "fork")


def test_our_scripts_can_be_read_again() -> None:
    """A spawned engine imports the script that started it: nothing runs outside of `if __name__ == "__main__":`."""
    root = PACKAGE.parent
    for file in [*root.glob("scripts/*.py"), *root.glob("benchmarks/**/*.py")]:
        for node in ast.parse(file.read_text()).body:
            called = ast.unparse(node) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
            assert not called or called.startswith(("os.environ.setdefault(", "sys.path.")), f"{file}: {called}"
    readme = (root / "README.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        assert ("LLM(" in block) == ("__main__" in block)


WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


@pytest.mark.parametrize("user", [None, *WAITING])
def test_idle_threads_wait_briefly_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch, user: str | None) -> None:
    """Workers on other machines get what is set before they import anything."""
    for name in WAITING:
        # a name that is set here is removed again at the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if user:
        monkeypatch.setenv(user, "passive")
    envs.let_idle_threads_wait_briefly(cores=16)
    expected = {user: "passive"} if user else {"GOMP_SPINCOUNT": "8000"}
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == expected
    assert expected.items() <= envs.needed_to_import().items()


def test_what_openmp_read_is_what_this_process_was_started_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "environ"
    started.write_bytes(b"HOME=/root\0GOMP_SPINCOUNT=7\0A=b=c\0")
    monkeypatch.setattr(envs, "_ENVIRONMENT_OF_START", started)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert envs.waiting_at_start() == {"GOMP_SPINCOUNT": "7"}
    started.unlink()
    assert envs.waiting_at_start() == {}


def test_threads_that_vllm_has_set_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", raising=False)
    assert envs.users_threads() == "3"
    monkeypatch.setenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "1")
    assert envs.users_threads() is None
