"""A group of tests in its own process: what each test did is known, even if it ends the process or does not end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from packaging.specifiers import SpecifierSet

from tests.conformance.expectations import Expectations, Group, Rule
from tests.conformance.group_run import GroupRun
from tests.conformance.outcome import Outcome

TESTS = {
    "test_plain.py": """
import os, time, pytest
def test_right(): pass
@pytest.mark.parametrize("value", ["a", "b"])
def test_wrong(value): assert value == "a"
def test_ends_the_process(): os._exit(7)
def test_after(): pass
def test_skips(): pytest.skip("no GPU here")
@pytest.fixture
def broken(): raise OSError("no model")
def test_set_up(broken): pass
def test_left_out(): os._exit(8)
@pytest.mark.xfail
def test_known_to_vllm(): assert False
""",
    "test_broken.py": "import a_package_that_is_not_there",
    "test_left_out.py": "import os; os._exit(9)",
}


def run(
    folder: Path,
    group: Group,
    expectations: Expectations,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, Outcome]:
    """The outcomes of a group of the tests above, by what follows the last slash of their ids."""
    (folder / "tests").mkdir()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    for name, text in TESTS.items():
        (folder / "tests" / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    found = GroupRun(group, expectations, folder, environment, folder / "logs").outcomes(progress)
    return {one.test.rpartition("/")[2]: one for one in found}


def rule(*tests: str, reason: str) -> tuple[Rule, ...]:
    return (Rule(tests, reason, SpecifierSet()),)


def test_every_outcome_is_known(tmp_path: Path) -> None:
    expectations = Expectations(
        (),
        rule("tests/test_left_out.py", "tests/test_plain.py::test_left_out", reason="needs a GPU"),
        rule("tests/test_plain.py::test_wrong[b]", reason="the plugin has its own"),
    )
    found = run(tmp_path, Group("g", ("tests",), (), 1.0), expectations)
    assert {name: one.kind for name, one in found.items()} == {
        "test_plain.py::test_right": "passed",
        "test_plain.py::test_wrong[a]": "passed",
        "test_plain.py::test_wrong[b]": "expected",
        "test_plain.py::test_ends_the_process": "failed",
        "test_plain.py::test_after": "passed",
        "test_plain.py::test_skips": "skipped",
        "test_plain.py::test_set_up": "failed",
        "test_plain.py::test_left_out": "not run",
        "test_plain.py::test_known_to_vllm": "skipped",
        "test_broken.py": "failed",
        "test_left_out.py": "not run",
    }
    messages = {name: one.message for name, one in found.items()}
    assert "exit status 7" in messages["test_plain.py::test_ends_the_process"]
    assert messages["test_plain.py::test_skips"] == "Skipped: no GPU here"
    assert messages["test_plain.py::test_set_up"] == "in its set-up: OSError: no model"
    assert "No module named 'a_package_that_is_not_there'" in messages["test_broken.py"]
    assert messages["test_left_out.py"] == "needs a GPU"


@pytest.mark.parametrize("others", [(), ("tests/test_plain.py",)])
def test_a_file_that_is_left_out_is_not_imported_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    monkeypatch.setitem(TESTS, "test_plain.py", "def test_right(): pass")
    left_out = Expectations((), rule("tests/test_left_out.py", reason="needs a GPU"), ())
    found = run(tmp_path, Group("g", ("tests/test_left_out.py", *others), (), 1.0), left_out)
    wanted = {"test_left_out.py": "not run"} | ({"test_plain.py::test_right": "passed"} if others else {})
    assert {name: one.kind for name, one in found.items()} == wanted


def test_a_group_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        TESTS, "test_plain.py", "import time\ndef test_hangs(): time.sleep(600)\ndef test_after(): pass\n"
    )
    since = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + since[0], sleep=time.sleep)
    monkeypatch.setattr("tests.conformance.group_run.time", clock)

    def an_hour_later(ended: int, collected: int, test: str) -> None:
        if test.endswith("test_hangs"):
            since[0] = 3600.0

    found = run(tmp_path, Group("g", ("tests/test_plain.py",), (), 9.0), Expectations((), (), ()), an_hour_later)
    assert "9 minutes were over" in found["test_plain.py::test_hangs"].message
    assert "1 tests did not run" in found["test_plain.py"].message


def test_a_test_that_outlives_its_time_has_failed_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        TESTS, "test_plain.py", "import time\ndef test_hangs(): time.sleep(600)\ndef test_after(): pass\n"
    )
    monkeypatch.setattr("tests.conformance.group_run.SECONDS_OF_A_TEST", 1)
    found = run(tmp_path, Group("g", ("tests/test_plain.py",), (), 9.0), Expectations((), (), ()))
    assert {name: one.kind for name, one in found.items()} == {
        "test_plain.py::test_hangs": "failed",
        "test_plain.py::test_after": "passed",
    }


def test_vllms_fixture_of_a_process_group_takes_the_platforms_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import pytest
from vllm.platforms import current_platform
begun = []
def init_distributed_environment(world_size, backend): begun.append(backend)
@pytest.fixture
def dist_init(): init_distributed_environment(world_size=1, backend="nccl")
@pytest.mark.parametrize("again", [False, True])
def test_group(dist_init, again): assert set(begun) == {current_platform.dist_backend} == {"gloo"}
"""
    monkeypatch.setitem(TESTS, "test_plain.py", text)
    monkeypatch.setenv("VLLM_GAUDI_UCM_DEVICE", "cpu")
    found = run(tmp_path, Group("g", ("tests/test_plain.py",), (), 5.0), Expectations((), (), ()))
    assert [one.kind for one in found.values()] == ["passed", "passed"], found


def test_a_group_whose_files_are_gone_has_failed(tmp_path: Path) -> None:
    found = run(tmp_path, Group("g", ("tests/test_gone.py",), (), 1.0), Expectations((), (), ()))
    assert found["test_gone.py"].message == "vLLM's tests have none of tests/test_gone.py"


@pytest.mark.parametrize("option", ["process_group=0", "start_new_session=True"])
def test_processes_that_a_test_leaves_are_ended_with_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    file = tmp_path / "left"
    text = f"""
import os, subprocess
def test_leaves_a_process_that_is_not_of_its_group():
    left = subprocess.Popen(["sleep", "600"], {option})
    open({str(file)!r}, "w").write(str(left.pid))
"""
    monkeypatch.setitem(TESTS, "test_plain.py", text)
    run(tmp_path, Group("g", ("tests/test_plain.py",), (), 1.0), Expectations((), (), ()))
    left = int(file.read_text())
    # a signal takes its time
    for _ in range(100):
        if not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the process is still there")
