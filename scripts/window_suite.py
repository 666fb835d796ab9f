"""The small suite for pairs of vLLM and torch, from requirements/window.toml, and the results of a run."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "requirements" / "window.toml"
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Suite:
    """Pairs with their descriptions; parts and their tests; tests that a part leaves out."""

    pairs: dict[str, str]
    parts: dict[str, list[str]]
    left_out: dict[str, list[str]]

    def arguments(self, parts: Iterable[str]) -> list[str]:
        """Arguments of pytest that select the tests of these parts."""
        parts = list(parts)
        ignored = [f"--ignore={path}" for part in parts for path in self.left_out.get(part, ())]
        return [test for part in parts for test in self.parts[part]] + ignored

    def part_of(self, nodeid: str) -> str:
        """The part that names this test, its file or its folder. Raises KeyError if none does."""
        for part, tests in self.parts.items():
            if any(nodeid == test or nodeid.startswith((f"{test}/", f"{test}::", f"{test}[")) for test in tests):
                return part
        raise KeyError(nodeid)


def load() -> Suite:
    """Reads the file."""
    return Suite(**tomllib.loads(FILE.read_text(encoding="utf-8")))


@dataclass
class PairResult:
    """The results of a run on one pair: versions, and for each part how many tests passed, failed and were skipped.

    failed: names of failed tests, or the error that stopped the run if it found no tests at all.
    """

    vllm: str
    torch: str
    python: str
    date: str
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed and bool(self.parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: Path, suite: Suite, result: PairResult) -> None:
    """Adds to `result` the content of pytest's JUnit file (family `xunit1`, which names the files of tests)."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        nodeid = _nodeid(case)
        outcome = _outcome(case)
        counts.setdefault(suite.part_of(nodeid), Counter())[outcome] += 1
        if outcome == "failed":
            result.failed.append(nodeid)
    result.parts = {part: {name: counts[part][name] for name in OUTCOMES} for part in suite.parts if part in counts}


def _nodeid(case: ElementTree.Element) -> str:
    path = case.get("file") or ""
    if not path:  # a file that could not be collected has its path as a name
        return (case.get("name") or case.get("classname") or "").replace(".", "/") + ".py"
    # a test in a class has the class behind the module
    module = path.removesuffix(".py").replace("/", ".")
    inner = (case.get("classname") or "").removeprefix(module).strip(".")
    return "::".join(filter(None, (path, inner, case.get("name"))))


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"
