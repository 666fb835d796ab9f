"""What is expected of each of vLLM's own tests: read from expectations.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

REFUSED = "UnsupportedFeatureError: vllm-gaudi-ucm does not support "
FILE = Path(__file__).with_name("expectations.toml")


@dataclass(frozen=True)
class Group:
    """Tests that run in one process.

    Args:
        name: how the table calls it.
        tests: files and folders of vLLM's source distribution.
        quick: which of them `--quick` runs; empty: none.
        minutes: after that the group's process is ended.
    """

    name: str
    tests: tuple[str, ...]
    quick: tuple[str, ...]
    minutes: float


@dataclass(frozen=True)
class Rule:
    """Tests that do not have to pass.

    Args:
        tests: patterns of test ids, such as `tests/v1/x.py::test_y*`; a file stands for all of its tests. Brackets of
            parametrised tests are written as they are, and match themselves.
        reason: why.
        vllm: versions that it applies to; empty: all.
    """

    tests: tuple[str, ...]
    reason: str
    vllm: SpecifierSet

    def pattern_of(self, test: str) -> str | None:
        """The first pattern that matches a test's id, None if none does."""
        return next((pattern for pattern in self.tests if matches(test, pattern)), None)


@dataclass(frozen=True)
class Refusal:
    """A feature that the plugin refuses by name: a test that asks for it fails with that error, in any file.

    Args:
        feature: pattern of the name that follows "vllm-gaudi-ucm does not support".
        reason: why.
    """

    feature: str
    reason: str

    def is_in(self, message: str) -> bool:
        """Whether an error is this refusal."""
        return fnmatchcase(message, f"*{REFUSED}{self.feature}*")


@dataclass(frozen=True)
class Expectations:
    """Groups of tests, all of which must pass, and the tests that do not have to, for one version of vLLM."""

    groups: tuple[Group, ...]
    not_run: tuple[Rule, ...]
    expected_to_fail: tuple[Rule, ...]
    refused: tuple[Refusal, ...] = ()

    def patterns_not_run(self) -> list[str]:
        """All patterns of tests that are not run, in the form of `escaped`."""
        return [escaped(pattern) for rule in self.not_run for pattern in rule.tests]


def matches(test: str, pattern: str) -> bool:
    """Whether a pattern names a test, or its file."""
    escape = escaped(pattern)
    return fnmatchcase(test, escape) or test.startswith(f"{pattern}::")


def escaped(pattern: str) -> str:
    """The pattern for fnmatch, to which `[` begins a set of characters; here only `*` and `?` are special."""
    return pattern.replace("[", "[[]")


def find_rule(rules: Iterable[Rule], test: str) -> Rule | None:
    """The first rule that names a test, None if none does."""
    return next((rule for rule in rules if rule.pattern_of(test)), None)


def load(version: str, file: Path = FILE) -> Expectations:
    """Returns what applies to this version of vLLM. Raises ValueError for an entry that is wrong, and names it."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := set(table) - {"groups", "not_run", "expected_to_fail", "refused"}:
        raise ValueError(f"{file.name}: found {sorted(unknown)}; expected groups, not_run, expected_to_fail, refused")
    groups = tuple(_group(entry, file.name) for entry in table["groups"])
    rules = {
        kind: [_rule(entry, f"{file.name}: {kind}") for entry in table.get(kind, [])]
        for kind in ("not_run", "expected_to_fail")
    }
    for pattern, count in _counts(pattern for kind in rules.values() for rule in kind for pattern in _keys(rule)):
        if count > 1:
            raise ValueError(f"{file.name}: {pattern} is listed {count} times; expected once")
    public = version.partition("+")[0]
    kept = {kind: tuple(rule for rule in found if rule.vllm.contains(public)) for kind, found in rules.items()}
    refused = tuple(_refusal(entry, f"{file.name}: refused") for entry in table.get("refused", []))
    return Expectations(groups, kept["not_run"], kept["expected_to_fail"], refused)


def _group(entry: dict[str, Any], place: str) -> Group:
    if set(entry) - {"quick"} != {"name", "tests", "minutes"}:
        raise ValueError(f"{place}: a group has name, tests, minutes and maybe quick; found {sorted(entry)}")
    return Group(entry["name"], tuple(entry["tests"]), tuple(entry.get("quick", ())), entry["minutes"])


def _rule(entry: dict[str, Any], place: str) -> Rule:
    if set(entry) - {"vllm"} != {"tests", "reason"} or not entry["reason"].strip() or not entry["tests"]:
        raise ValueError(f"{place}: an entry has tests, a reason and maybe vllm; found {entry}")
    return Rule(tuple(entry["tests"]), entry["reason"], SpecifierSet(entry.get("vllm", "")))


def _refusal(entry: dict[str, Any], place: str) -> Refusal:
    if set(entry) != {"feature", "reason"} or not all(value.strip() for value in entry.values()):
        raise ValueError(f"{place}: an entry has a feature and a reason; found {entry}")
    return Refusal(entry["feature"], entry["reason"])


def _keys(rule: Rule) -> list[str]:
    return [f"{pattern} ({rule.vllm or 'any version'})" for pattern in rule.tests]


def _counts(values: Iterable[str]) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return list(found.items())


def select(groups: Sequence[Group], names: Sequence[str], quick: bool) -> list[Group]:
    """The groups to run: those with these names (all if there are none), and of each what `quick` asks for.

    Raises ValueError for a name that no group has.
    """
    known = [group.name for group in groups]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--group {wrong[0]}: no such group; choose from {', '.join(known)}")
    chosen = [group for group in groups if not names or group.name in names]
    if not quick:
        return chosen
    return [Group(group.name, group.quick, group.quick, group.minutes) for group in chosen if group.quick]
