"""Tests of the simulated card run in a child process, because importing it changes torch for good.

The first test of a mode that is asked for starts a child pytest with all selected tests of that mode; every test here
then waits for what the child reports of it. A module with `ON_HOST = True` runs in this process; one with
`PT_HPU_LAZY_MODE = "1"` runs in lazy mode, which the simulator has where it is told to be the vendor's fork of torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.sim_path import SIM_PATH

ROOT = Path(__file__).parents[2]
REPORT = "SIM_HPU_TEST_REPORT"
IN_CHILD = importlib.util.find_spec("habana_frameworks") is not None
# Of the child, without a test that ends: a busy machine slows it down, only a hanging test stops it.
SILENCE_SECONDS = 600


class Child:
    """A pytest process on the simulated card in one mode, and what it has reported so far: (outcome, details)."""

    def __init__(self, lazy: str, tests: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sim-hpu-")
        report, output = (Path(self._folder.name) / name for name in ("report.jsonl", "output"))
        report.touch()
        env = {**os.environ, "PYTHONPATH": SIM_PATH, "PT_HPU_LAZY_MODE": lazy, "SIM_HPU_TORCH_FORK": lazy}
        env[REPORT] = str(report)
        env.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        self._output, self._report = output.open("w+"), report.open()
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)
        self._outcomes: dict[str, tuple[str, str]] = {}
        self._unfinished_line = ""

    def outcome(self, nodeid: str) -> tuple[str, str]:
        """What became of a test; waits for it."""
        heard = time.monotonic()
        while nodeid not in self._outcomes:
            ended = self._process.poll() is not None
            if self._listen():
                heard = time.monotonic()
            elif ended:
                return "failed", f"the child process ended without this test\n{self._last_words()}"
            elif time.monotonic() - heard > SILENCE_SECONDS:
                self._process.kill()
                self._process.wait()
            else:
                time.sleep(0.05)
        return self._outcomes[nodeid]

    def _listen(self) -> bool:
        """Reads on in the report. Returns whether there was more."""
        more = self._report.read()
        *lines, self._unfinished_line = (self._unfinished_line + more).split("\n")
        for line in lines:
            nodeid, outcome, details = json.loads(line)
            self._outcomes[nodeid] = outcome, details
        return bool(more)

    def _last_words(self) -> str:
        self._output.seek(0)
        return self._output.read()[-4000:]

    def close(self) -> None:
        """Ends the process, if tests of it were never asked for."""
        self._process.kill()
        self._process.wait()
        self._report.close()
        self._output.close()
        self._folder.cleanup()


_children = pytest.StashKey[dict[str, Child]]()
_ended: dict[str, tuple[str, str]] = {}


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In the parent a test's body is what the child said of it."""
    if IN_CHILD or getattr(pyfuncitem.module, "ON_HOST", False):
        return None
    session, lazy = pyfuncitem.session, _lazy_mode(pyfuncitem)
    children = session.stash.setdefault(_children, {})
    if lazy not in children:
        children[lazy] = Child(lazy, _tests_of_mode(session, lazy))
    outcome, details = children[lazy].outcome(pyfuncitem.nodeid)
    if outcome == "skipped":
        pytest.skip(details)
    if outcome != "passed":
        pytest.fail(details, pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for child in session.stash.get(_children, {}).values():
        child.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child: one line per test, after its teardown, with what failed first."""
    if not IN_CHILD or REPORT not in os.environ:
        return
    if report.nodeid not in _ended or _ended[report.nodeid][0] == "passed":
        _ended[report.nodeid] = report.outcome, report.longreprtext
    if report.when == "teardown":
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, *_ended[report.nodeid]]) + "\n")


def _lazy_mode(item: pytest.Item) -> str:
    return getattr(item.module, "PT_HPU_LAZY_MODE", "0") if isinstance(item, pytest.Function) else "0"


def _tests_of_mode(session: pytest.Session, lazy: str) -> list[str]:
    here = [item for item in session.items if item.path.parent == Path(__file__).parent and _lazy_mode(item) == lazy]
    return [item.nodeid for item in here if isinstance(item, pytest.Function) and not hasattr(item.module, "ON_HOST")]


@pytest.fixture
def ht() -> Any:
    """The package `habana_frameworks.torch`."""
    return importlib.import_module("habana_frameworks.torch") if IN_CHILD else None


@pytest.fixture(autouse=True)
def card(ht: Any) -> Iterator[Any]:
    """The simulated card, as if the process had just started."""
    if not IN_CHILD:
        yield None
        return
    simulator = importlib.import_module("habana_frameworks.torch.simulator")
    recipes = importlib.import_module("habana_frameworks.torch.simulator.recipes").recipes
    ht.hpu.synchronize()
    _forget(simulator)
    recipes.forget()
    yield simulator.card
    _forget(simulator)


def _forget(simulator: Any) -> None:
    settings = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    simulator.card.reset()
    simulator.duties.reset()
    simulator.garbage.forget()
    settings.reset_settings()


@pytest.fixture
def duties(card: Any) -> Any:
    """What the simulator enforces: counts, severity, switches."""
    return importlib.import_module("habana_frameworks.torch.simulator").duties if IN_CHILD else None


@pytest.fixture
def forbidden(card: Any) -> Callable[[str], AbstractContextManager[Any]]:
    """`with forbidden("operator: finding")` expects the constraint error with these words in this order."""

    def expect(words: str) -> AbstractContextManager[Any]:
        error = importlib.import_module("habana_frameworks.torch.simulator").HpuConstraintError
        return pytest.raises(error, match=".*".join(map(re.escape, words.split(" ... "))))

    return expect


@pytest.fixture
def compilations(card: Any) -> Callable[[Callable[[], object]], int]:
    """Recipes that a call compiles, by the bridge's own metric."""

    def count(call: Callable[[], object]) -> int:
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
        with metrics.metric_localcontext("graph_compilation") as metric:
            call()
        return int(dict(metric.stats())["TotalNumber"])

    return count
