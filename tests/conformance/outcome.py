"""How a test of vLLM's ended, compared with what was expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.conformance.expectations import Expectations, Rule, find_rule, matches

Kind = Literal["passed", "failed", "surprise", "refused", "expected", "skipped", "not run"]
KINDS: Mapping[Kind, str] = {
    "passed": "passed",
    "failed": "failed, and must pass",
    "surprise": "passed, and was expected to fail",
    "refused": "failed, because the plugin refuses a feature by name",
    "expected": "failed, as expected",
    "skipped": "skipped by the test itself, for want of a GPU, a model or a package",
    "not run": "left out",
}
WRONG: tuple[Kind, ...] = ("failed", "surprise")


@dataclass(frozen=True)
class Outcome:
    """One test of vLLM's.

    Args:
        group: the group that ran it.
        test: its id, `tests/v1/x.py::test_y[z]`; a file if it could not be imported, or if none of it was run.
        kind: how it ended.
        message: the last line of the error, the reason of the skip, or of the entry in the data file.
        seconds: how long it took.
    """

    group: str
    test: str
    kind: Kind
    message: str = ""
    seconds: float = 0.0

    @property
    def file(self) -> str:
        """The file that has the test."""
        return self.test.partition("::")[0]


def judge(group: str, test: str, ended: str, message: str, seconds: float, expectations: Expectations) -> Outcome:
    """Compares how pytest says that a test ended (passed, failed, skipped, not run) with what was expected."""
    rule = find_rule(expectations.expected_to_fail, test)
    if ended == "not run":
        left_out = find_rule(expectations.not_run, test)
        return Outcome(group, test, "not run", left_out.reason if left_out else message)
    if ended == "failed" and rule is not None:
        return Outcome(group, test, "expected", rule.reason, seconds)
    if ended == "failed" and (refusal := next((one for one in expectations.refused if one.is_in(message)), None)):
        return Outcome(group, test, "refused", refusal.reason, seconds)
    if ended == "passed" and rule is not None:
        return Outcome(group, test, "surprise", f"listed as: {rule.reason}", seconds)
    kinds: dict[str, Kind] = {"passed": "passed", "failed": "failed", "skipped": "skipped"}
    return Outcome(group, test, kinds[ended], message, seconds)


def unmatched(rules: Iterable[Rule], tests: Iterable[str]) -> list[str]:
    """Patterns that name no test: vLLM has renamed or removed it, or the pattern is wrong.

    Args:
        rules: entries of the data file.
        tests: ids of all tests of whole groups, and files that were left out.
    """
    known = list(tests)
    return [
        pattern
        for rule in rules
        for pattern in rule.tests
        if not any(matches(test, pattern) or test == pattern for test in known)
    ]


def problems(outcomes: Iterable[Outcome], stale: Iterable[str]) -> list[str]:
    """What makes a run fail, a line each: failures, surprises, patterns without a test, groups in which none passed."""
    found = list(outcomes)
    lines = [f"failed: {one.test}: {one.message}" for one in found if one.kind == "failed"]
    lines += [
        f"passed, but is expected to fail: {one.test} ({one.message}); take it off the list"
        for one in found
        if one.kind == "surprise"
    ]
    lines += [f"no such test: {pattern}; correct the pattern, or give it versions of vLLM" for pattern in stale]
    groups = dict.fromkeys(one.group for one in found)
    passed = {one.group for one in found if one.kind == "passed"}
    return lines + [f"no test of the group passed: {group}" for group in groups if group not in passed]
