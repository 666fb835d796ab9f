"""Plugin of pytest for vLLM's own tests: leaves some out, and writes each outcome to a file as soon as it is known.

It runs in a process whose package `tests` is vLLM's, so it imports none of ours but the plugin itself.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.vllm_api.platforms import tolerate_missing_accelerator

SETTINGS = "UCM_CONFORMANCE_SETTINGS"
"""Variable with the path of a JSON file: `events` (a path), `not_run` (patterns of tests), `done` (ids of tests)."""
_FAILED_IN = {"setup": "in its set-up: ", "teardown": "in its clean-up: "}


class Recorder:
    """Leaves out what the settings name, and writes an event for each test that begins and ends.

    Args:
        settings: the content of the settings' file.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._not_run, self._done = settings["not_run"], frozenset(settings["done"])
        self._file = Path(settings["events"]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Keeps pytest from importing files of which no test runs: they may need what is not installed."""
        path = collection_path.relative_to(config.rootpath).as_posix() if collection_path != config.rootpath else ""
        return True if path.endswith(".py") and self._is_left_out(path) else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects tests that are not run, and those that an earlier process has done."""
        left_out = [item for item in items if self._is_left_out(item.nodeid)]
        for item in left_out:
            self._write(event="not run", test=item.nodeid)
        kept = [item for item in items if item not in set(left_out) and item.nodeid not in self._done]
        self._write(event="collected", count=len(kept))
        gone = [item for item in items if item not in set(kept)]
        if gone:
            config.hook.pytest_deselected(items=gone)
        items[:] = kept

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Keeps imported objects out of the collections after each test; vLLM's clean-up would thaw them."""
        gc.freeze()
        for name in ("freeze", "unfreeze"):
            setattr(gc, name, lambda: None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Writes a file that cannot be imported as one failed test, and one that skips itself as one skipped."""
        if report.outcome != "passed":
            self._write(event="ended", test=report.nodeid, outcome=report.outcome, message=_message(report), seconds=0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Writes that a test begins: if no end follows, it ended the process."""
        self._write(event="began", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes how a phase of a test ended. A test has passed if its call has, and no other phase failed."""
        if report.when == "call" or report.outcome != "passed":
            message = _FAILED_IN.get(report.when or "", "") if report.outcome == "failed" else ""
            self._write(
                event="ended",
                test=report.nodeid,
                # what vLLM itself expects to fail is no failure of the plugin
                outcome="skipped" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome,
                message=message + _message(report),
                seconds=round(report.duration, 2),
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Writes that a test has ended, its clean-up included."""
        self._write(event="finished", test=nodeid)

    def _is_left_out(self, test: str) -> bool:
        return any(fnmatchcase(test, pattern) or test.startswith(f"{pattern}::") for pattern in self._not_run)

    def _write(self, **event: object) -> None:
        self._file.write(json.dumps(event) + "\n")


def _message(report: Any) -> str:
    """The begin of an error, or the reason of a skip."""
    found = report.longrepr
    if isinstance(found, tuple):
        return str(found[2])
    crash = getattr(found, "reprcrash", None)
    lines = [line.strip() for line in str(crash.message if crash else found or "").splitlines() if line.strip()]
    if not crash and lines:
        lines = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")][-1:] or lines[-1:]
    return " ".join(lines)[:400] or getattr(report, "wasxfail", "")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Has vLLM's fixture of a process group take the platform's backend: it knows Gloo and NCCL alone, by device."""
    if fixturedef.argname == "dist_init":
        names = fixturedef.func.__globals__
        begin = names["init_distributed_environment"]
        names["init_distributed_environment"] = begin if hasattr(begin, "__wrapped__") else _on_the_platform(begin)


def _on_the_platform(begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def begun(**given: Any) -> None:
        # not while vLLM looks for its platform
        from vllm.platforms import current_platform

        begin(**{**given, "backend": current_platform.dist_backend})

    return begun


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder, where the settings ask for one."""
    # the clean-up after each test calls torch.accelerator, even if the test has made no configuration
    tolerate_missing_accelerator("cpu")
    if path := os.environ.get(SETTINGS):
        config.pluginmanager.register(Recorder(json.loads(Path(path).read_text(encoding="utf-8"))), "ucm-recorder")
