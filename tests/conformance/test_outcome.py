"""What makes a run of vLLM's own tests fail."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from tests.conformance.expectations import REFUSED, Expectations, Refusal, Rule
from tests.conformance.outcome import Outcome, judge, problems, unmatched


def rule(*tests: str, reason: str = "a reason") -> Rule:
    return Rule(tests, reason, SpecifierSet())


EXPECTATIONS = Expectations(
    (),
    (rule("tests/gpu.py", reason="needs a GPU"),),
    (rule("tests/a.py::test_own*"),),
    (Refusal("pooling models", "decoders only"),),
)


@pytest.mark.parametrize(
    ("test", "ended", "kind", "message"),
    [
        ("tests/a.py::test_x", "passed", "passed", "said"),
        ("tests/a.py::test_x", "failed", "failed", "said"),
        ("tests/a.py::test_x", "skipped", "skipped", "said"),
        ("tests/a.py::test_own[1]", "failed", "expected", "a reason"),
        ("tests/a.py::test_own[1]", "passed", "surprise", "listed as: a reason"),
        ("tests/a.py::test_own[1]", "skipped", "skipped", "said"),
        ("tests/gpu.py", "not run", "not run", "needs a GPU"),
    ],
)
def test_judgement(test: str, ended: str, kind: str, message: str) -> None:
    found = judge("g", test, ended, "said", 1.0, EXPECTATIONS)
    assert (found.kind, found.message) == (kind, message)


def test_a_listed_refusal_is_no_failure_and_another_is() -> None:
    kinds = [
        judge(
            "g", "tests/a.py::test_x", "failed", f"errors.{REFUSED}{feature} (asked for by x)", 1.0, EXPECTATIONS
        ).kind
        for feature in ("pooling models", "the KV connector X")
    ]
    assert kinds == ["refused", "failed"]


def test_a_run_as_expected_has_no_problems() -> None:
    outcomes = [
        Outcome("g", "tests/a.py::test_x", "passed"),
        Outcome("g", "tests/a.py::test_own", "expected"),
        Outcome("g", "tests/gpu.py", "not run"),
        Outcome("g", "tests/b.py", "skipped"),
    ]
    assert problems(outcomes, []) == []


def test_failures_surprises_and_stale_patterns_are_named() -> None:
    outcomes = [
        Outcome("g", "tests/a.py::test_x", "failed", "assert 1 == 2"),
        Outcome("g", "tests/a.py::test_own", "surprise", "listed as: a reason"),
        Outcome("g", "tests/a.py::test_y", "passed"),
        Outcome("h", "tests/b.py", "skipped"),
    ]
    assert problems(outcomes, ["tests/gone.py"]) == [
        "failed: tests/a.py::test_x: assert 1 == 2",
        "passed, but is expected to fail: tests/a.py::test_own (listed as: a reason); take it off the list",
        "no such test: tests/gone.py; correct the pattern, or give it versions of vLLM",
        "no test of the group passed: h",
    ]


def test_patterns_that_name_no_test() -> None:
    rules = [rule("tests/a.py", "tests/b.py::test_*", "tests/c.py::test_z[x]")]
    assert unmatched(rules, ["tests/a.py", "tests/b.py::test_q[1]"]) == ["tests/c.py::test_z[x]"]
