"""Runs a group of vLLM's tests in processes of its own, and follows what they write."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.conformance.expectations import Expectations, Group
from tests.conformance.outcome import Outcome, judge

CHILD = Path(__file__).with_name("child")
SECONDS_OF_A_TEST = 400
_VARIABLE = "UCM_CONFORMANCE_SETTINGS"
# of runs that end before their tests do: after so many the group is given up
_PROCESSES = 12


@dataclass
class Events:
    """What processes of a group have written so far, by test."""

    collected: int = 0
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: set[str] = field(default_factory=set)
    running: str | None = None
    collections: int = 0

    def read(self, line: str) -> None:
        """Takes one line of the events' file."""
        event = json.loads(line)
        name, test = event["event"], event.get("test")
        if name == "collected":
            self.collections += 1
            self.collected = event["count"] + len(self.ended)
        elif name == "not run":
            self.not_run.add(test)
        elif name == "began":
            self.running = test
        elif name == "finished":
            self.running = None
        else:
            self._end(test, event)

    def _end(self, test: str, event: dict[str, Any]) -> None:
        """A test ends up to three times: set-up, call, clean-up. The worst counts, and the seconds add up."""
        before = self.ended.get(test)
        if before is not None:
            event["seconds"] += before["seconds"]
            if before["outcome"] == "failed" or event["outcome"] == "passed":
                event["outcome"], event["message"] = before["outcome"], before["message"]
        self.ended[test] = event

    def give_up(self, why: str) -> str | None:
        """Counts the test that is running as failed, and returns it; None if none is."""
        test, self.running = self.running, None
        if test is not None:
            self._end(test, {"outcome": "failed", "message": why, "seconds": 0.0})
        return test


class GroupRun:
    """Runs a group, once.

    Args:
        group: what to run.
        expectations: what is expected.
        tree: folder with vLLM's `tests`.
        environment: variables of the tests' process.
        logs: folder for what pytest prints.
        extra: arguments for pytest.
    """

    def __init__(
        self,
        group: Group,
        expectations: Expectations,
        tree: Path,
        environment: Mapping[str, str],
        logs: Path,
        extra: tuple[str, ...] = (),
    ) -> None:
        self._group, self._expectations, self._tree, self._extra = group, expectations, tree, extra
        self._environment = dict(environment)
        self._left_out = set(self._files_left_out())
        # a version of vLLM may lack a file; pytest imports one that is named, even if it is to be left out
        self._tests = [
            test for test in group.tests if (tree / test.partition("::")[0]).exists() and test not in self._left_out
        ]
        self._log = logs / f"{group.name.replace(' ', '-').replace('/', '-')}.log"
        self._events = Events()
        self._problem = ""

    def outcomes(self, progress: Callable[[int, int, str], None]) -> list[Outcome]:
        """Runs all tests, and returns how they ended.

        A test that ends its process, or that outlives its time, has failed; a new process does the others. What is left
        when the group's time is over has failed, too.

        Args:
            progress: called with the tests that have ended, those that there are, and the one that runs.
        """
        if not self._tests and not self._left_out:
            message = f"vLLM's tests have none of {', '.join(self._group.tests)}"
            return [Outcome(self._group.name, " ".join(self._group.tests), "failed", message)]
        deadline = time.monotonic() + self._group.minutes * 60
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        if self._tests:
            self._run_processes(deadline, progress)
        found = [
            judge(self._group.name, test, one["outcome"], one["message"], one["seconds"], self._expectations)
            for test, one in self._events.ended.items()
        ]
        found += [
            judge(self._group.name, test, "not run", "", 0.0, self._expectations)
            for test in sorted(self._events.not_run | self._left_out)
        ]
        lost = self._events.collected - len(self._events.ended)
        if self._problem:
            message = f"{self._problem}{f'; {lost} tests did not run' if lost > 0 else ''}; log: {self._log}"
            found.append(Outcome(self._group.name, " ".join(self._group.tests), "failed", message))
        return found

    def _run_processes(self, deadline: float, progress: Callable[[int, int, str], None]) -> None:
        for _ in range(_PROCESSES):
            if self._run_process(deadline, progress):
                return
        self._problem = f"{_PROCESSES} processes ended before their tests did"

    def _run_process(self, deadline: float, progress: Callable[[int, int, str], None]) -> bool:
        """Runs the tests that have not ended. Returns whether there is nothing left to do."""
        events = self._events
        collections = events.collections
        with tempfile.TemporaryDirectory(prefix="conformance-") as name, self._log.open("ab") as log:
            written = Path(name) / "events"
            written.touch()
            process = self._start(Path(name), written, log)
            try:
                for line in _lines(written, process, deadline):
                    events.read(line)
                    progress(len(events.ended), events.collected, events.running or "")
                late = time.monotonic() > deadline
            finally:
                _end(process, _settings(Path(name)))
        if late:
            events.give_up(f"not done when the group's {self._group.minutes:g} minutes were over")
            self._problem = f"the group took more than its {self._group.minutes:g} minutes"
            return True
        # first: the limit of a test's time ends pytest with the status of one that had failures
        if events.give_up(f"ended the process, or took over {SECONDS_OF_A_TEST} s (exit status {process.returncode})"):
            return False
        if process.returncode in (0, 1, 5):  # all passed, some failed, nothing left
            return True
        if events.collections > collections and len(events.ended) >= events.collected:
            return True
        self._problem = f"pytest ended with status {process.returncode}"
        return True

    def _start(self, folder: Path, events: Path, log: Any) -> subprocess.Popen[bytes]:
        settings = {
            "events": str(events),
            "not_run": self._expectations.patterns_not_run(),
            "done": sorted(self._events.ended),
        }
        _settings(folder).write_text(json.dumps(settings), encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(CHILD), self._environment.get("PYTHONPATH"))))
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-p", "conformance_plugin", "-p", "no:cacheprovider"),
                *(
                    "--rootdir",
                    str(self._tree),
                    "-c",
                    str(self._tree / "pyproject.toml"),
                    "--continue-on-collection-errors",
                ),
                *("--timeout", str(SECONDS_OF_A_TEST), "--timeout-method", "thread", "--tb", "short", "-rf"),
                *self._extra,
                *self._tests,
            ],
            cwd=self._tree,
            env={
                **self._environment,
                "PYTHONPATH": path,
                _VARIABLE: str(_settings(folder)),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _files_left_out(self) -> Iterator[str]:
        """Files of the group of which no test runs."""
        for rule in self._expectations.not_run:
            for pattern in rule.tests:
                if "::" in pattern:
                    continue
                for file in self._tree.glob(pattern):
                    test = file.relative_to(self._tree).as_posix()
                    if any(test == one or test.startswith(f"{one}/") for one in self._group.tests):
                        yield test


def _lines(file: Path, process: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Lines of a file as they are written, until the process ends or the time is over."""
    with file.open(encoding="utf-8") as stream:
        pending = ""
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            pending += stream.read()
            *lines, pending = pending.split("\n")
            yield from lines
            if ended:
                return
            time.sleep(0.1)


def _settings(folder: Path) -> Path:
    return folder / "settings.json"


def _end(process: subprocess.Popen[bytes], settings: Path) -> None:
    """Ends the process and all that it started. Some are sessions of their own: the variable of the settings tells."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) == process.pid or one.environ().get(_VARIABLE) == str(settings):
                one.kill()
    process.wait()
