"""Tests of the simulated card run in a child process, because importing it changes torch for good.

The first test of a mode that is asked for starts a child pytest with all selected tests of that mode; every test here
then reports what it did there. A module with `ON_HOST = True` runs in this process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIM = ROOT / "tests" / "sim_hpu"
REPORT = "SIM_HPU_TEST_REPORT"
IN_CHILD = importlib.util.find_spec("habana_frameworks") is not None

Outcomes = dict[str, tuple[str, str]]
_outcomes = pytest.StashKey[dict[str, Outcomes]]()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In the parent a test's body is what the child said of it."""
    if IN_CHILD or getattr(pyfuncitem.module, "ON_HOST", False):
        return None
    lazy = _lazy_mode(pyfuncitem)
    known = pyfuncitem.session.stash.setdefault(_outcomes, {})
    if lazy not in known:
        known[lazy] = _run_child(pyfuncitem.session, lazy)
    outcome, details = known[lazy].get(pyfuncitem.nodeid, ("failed", "the child process did not run this test"))
    if outcome == "skipped":
        pytest.skip(details)
    if outcome != "passed":
        pytest.fail(details, pytrace=False)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child: one line per test that ended, or failed earlier."""
    if IN_CHILD and REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")


def _lazy_mode(item: pytest.Item) -> str:
    return getattr(item.module, "PT_HPU_LAZY_MODE", "1") if isinstance(item, pytest.Function) else "1"


def _run_child(session: pytest.Session, lazy: str) -> Outcomes:
    here = [item for item in session.items if item.path.parent == Path(__file__).parent and _lazy_mode(item) == lazy]
    tests = [item.nodeid for item in here if isinstance(item, pytest.Function) and not hasattr(item.module, "ON_HOST")]
    report = session.config.rootpath / ".pytest_cache" / f"sim-hpu-{os.getpid()}-{lazy}.jsonl"
    report.parent.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(SIM), "PT_HPU_LAZY_MODE": lazy, REPORT: str(report)}
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=250)
    if not report.exists():
        pytest.fail(f"the child process ran no test\n{done.stdout}\n{done.stderr}", pytrace=False)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    report.unlink()
    return {nodeid: (outcome, details) for nodeid, outcome, details in lines}


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
    simulator.card.reset()
    recipes.forget()
    yield simulator.card
    simulator.card.reset()


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
