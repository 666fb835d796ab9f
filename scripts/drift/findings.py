"""Finds differences between the table and one version of vLLM, and whether this package's code still works with it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Signature

from scripts.drift.classes import Class, Member
from scripts.drift.contracts import ACCEPTED, Contract
from scripts.drift.signatures import refused_calls, signature_of, signature_of_fields
from scripts.drift.table import Described, Version
from scripts.drift.uses import OURS, VLLM, Use, Uses, shown

VANISHED, MOVED, CHANGED, ABSTRACT = "vanished", "moved", "changed", "abstract"
KINDS = (VANISHED, MOVED, ABSTRACT, CHANGED)
Table = Mapping[tuple[str, str], Contract]


@dataclass(frozen=True)
class Finding:
    """One difference.

    is_broken: the code does not work with it. kind: vanished, moved, changed or abstract. says: a sentence with the
    difference and the remedy. was, now: signatures or types. places: uses, as file:line and how.
    """

    kind: str
    name: str
    is_broken: bool
    says: str
    was: tuple[str, ...] = ()
    now: str = ""
    places: tuple[str, ...] = ()


class Comparison:
    """Compares the table with a version. uses: the code's uses of names, with places and calls."""

    def __init__(self, table: Table, version: Version, uses: Uses) -> None:
        self._table, self._version, self._uses = table, version, uses
        self._by_key = uses.by_key()

    def findings(self) -> list[Finding]:
        """All differences, the broken ones first."""
        found = [finding for row in self._table.values() for finding in self._row(row)]
        found += [finding for class_ in self._uses.classes for finding in self._class(class_)]
        return sorted(set(found), key=lambda one: (not one.is_broken, KINDS.index(one.kind), one.name, one.says))

    def _row(self, row: Contract) -> Iterator[Finding]:
        now = self._version.described(row.name, row.member, derived=_is_derived(row))
        if now is None:
            if not self._is_dispensable(row):
                yield self._missing(row)
            return
        problems = [*self._problems(row, now)]
        if problems:
            says = f"{'; '.join(problems)}."
            yield Finding(CHANGED, row.full_name, True, says, row.what, now.text, self._places(row))
        elif now.text not in row.what:
            says = f"{_difference(row.what[-1], now.text)}. The code still fits."
            yield Finding(CHANGED, row.full_name, False, says, row.what, now.text, self._places(row))

    def _is_dispensable(self, row: Contract) -> bool:
        if row.instead:
            return any(self._version.described(name, "") is not None for name in row.instead)
        # a member of a class that only another version has
        return row.is_optional or (bool(row.member) and self._is_without_class(row))

    def _is_without_class(self, row: Contract) -> bool:
        """Returns whether the class is missing in a way that other rows report or allow: it is imported, or it comes
        from a module that the code can do without."""
        if self._version.class_(row.name) is not None:
            return False
        module = row.name.rpartition(".")[0]
        imported = [one for one in self._table.values() if not one.member]
        from_module = (one for one in imported if one.is_optional and f"{one.name}.".startswith(f"{module}."))
        return any(row.name in (one.name, *one.defined) for one in imported) or any(from_module)

    def _missing(self, row: Contract) -> Finding:
        last = row.full_name.rpartition(".")[2]
        if not row.member:
            places = self._version.tree.elsewhere(VLLM, last)
            if places:
                says = f"Not at this place any more: {' or '.join(places)}. Import it from where it is."
                return Finding(MOVED, row.full_name, True, says, row.what, places[0], self._places(row))
            owner = self._version.tree.module(row.name.rpartition(".")[0])
            alike = [] if owner is None else _alike(last, owner.definitions)
        else:
            class_ = self._version.class_(row.name)
            if class_ is None:
                says = "Its class is not there any more."
                return Finding(VANISHED, row.full_name, True, says, row.what, "", self._places(row))
            others = class_.names() - {one.member for one in self._table.values()}
            alike = self._same_signature(row, class_) or _alike(last, others)
        hint = f" Perhaps it is called {' or '.join(alike)} now." if alike else ""
        overrides = any(how == "overrides" for how, _ in row.users)
        effect = " vLLM never calls what overrides it." if overrides else ""
        return Finding(
            VANISHED, row.full_name, True, f"Not there any more.{effect}{hint}", row.what, "", self._places(row)
        )

    def _same_signature(self, row: Contract, class_: Class) -> list[str]:
        """Other members of a class, not in the table, with the same parameters and types."""
        if not row.what[-1].startswith("("):
            return []
        known = {one.member for one in self._table.values() if one.name == row.name}
        members = {name: class_.member(name) for name in sorted(class_.names() - known)}
        same = [name for name, one in members.items() if one is not None and one.text == row.what[-1]]
        return [name for name in same if get_close_matches(row.member, [name], cutoff=0.3)][:3]

    def _problems(self, row: Contract, now: Described) -> Iterator[str]:
        """Yields why the code does not work with the name in the version."""
        was, is_now = _kind(row.what[-1]), _kind(now.text)
        if was != is_now and "function" in (was, is_now):
            yield f"It was a {was}, and is a {is_now} now"
            return
        if now.signature is None:
            return
        before = [signature for text in row.what if (signature := parsed(text)) is not None]
        for use in self._by_key.get(row.key, ()):
            if use.call is None:
                continue
            problem = _refusal(use, now)
            # if it was refused before, the reading of the code was wrong
            if problem is not None and (not before or any(use.call.problem(one) is None for one in before)):
                yield f"{use.place} calls it in a way that it does not take: {problem}"

    def _class(self, ours: Class) -> Iterator[Finding]:
        """Yields members that a class of this package lacks, and methods that cannot take vLLM's calls."""
        called = ours.name.removeprefix(f"{OURS}.")
        bases = [one.name for one in ours.family if one.name.startswith(f"{VLLM}.")]
        theirs = [class_ for name in bases if (class_ := self._version.class_(name)) is not None]
        for name, (own, place) in _overriding(ours).items():
            hidden = next((one.own_members[name] for one in theirs if name in one.own_members), None)
            if hidden is None or hidden.signature is None or f"{called}.{name}" in ACCEPTED:
                continue
            for problem in refused_calls(hidden.signature, own):
                says = f"{called}.{name} {problem}, with which vLLM may call it."
                yield Finding(CHANGED, f"{hidden.owner}.{name}", True, says, (), hidden.text, (f"{place} overrides",))
        if any(ours in one.family[1:] for one in self._uses.classes):
            return
        own_names = {name for one in ours.family if not one.name.startswith(f"{VLLM}.") for name in one.own_members}
        for name in sorted(_missing_of(theirs) - own_names):
            member = next(one.own_members[name] for one in theirs if name in one.own_members)
            says = f"{called} does not define this abstract member, so that it cannot be made any more."
            place = f"{shown(ours.module.file)}:{ours.node.lineno}"
            yield Finding(ABSTRACT, f"{member.owner}.{name}", True, says, (), member.text, (f"{place} derives",))

    def _places(self, row: Contract) -> tuple[str, ...]:
        uses = self._by_key.get(row.key, ())
        found = dict.fromkeys(f"{use.place} {use.how}" for use in uses)
        return tuple(found) or tuple(f"{file} {how}" for how, files in row.users for file in files)


def _refusal(use: Use, now: Described) -> str | None:
    """Returns why a call is refused. A method that is called by its class is given `self`, too."""
    assert use.call is not None
    assert now.signature is not None
    problem = use.call.problem(now.signature)
    if problem is not None and now.unbound is not None and use.call.problem(now.unbound) is None:
        return None
    return problem


def _overriding(ours: Class) -> dict[str, tuple[Signature, str]]:
    """Returns the methods of a class of this package: their parameters without `self`, and their places."""
    found = {}
    for name, member in ours.own_members.items():
        if member.signature is not None and not (name.startswith("__") and name.endswith("__")):
            found[name] = (member.signature, f"{shown(member.module.file)}:{getattr(member.node, 'lineno', 0)}")
    return found


def _missing_of(theirs: Iterable[Class]) -> set[str]:
    """Abstract members of the bases, as they are looked up."""
    first: dict[str, Member] = {}
    for one in theirs:
        for name, member in one.own_members.items():
            first.setdefault(name, member)
    return {name for name, member in first.items() if member.is_abstract}


def _is_derived(row: Contract) -> bool:
    return any(how == "derives" for how, _ in row.users)


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """Returns names of the same words in another order, otherwise names with almost the same letters."""
    words, known = sorted(name.split("_")), sorted(names)
    same = [one for one in known if sorted(one.split("_")) == words]
    return same or get_close_matches(name, known, n=2, cutoff=0.75)


def _kind(text: str) -> str:
    """The kind that a text of the table begins with."""
    if text.startswith(("(", "async (", "fields(")):
        return "function"
    return text.partition(":")[0].partition("(")[0].partition(" ")[0]


def parsed(text: str) -> Signature | None:
    """The parameters of a signature in the table, without `self`; None if it is no signature."""
    if text.startswith("fields("):
        names = [part.partition(" = ") for part in text[len("fields(") : -1].split(", ") if part]
        return signature_of_fields((name, bool(default), False) for name, _, default in names)
    text = text.removeprefix("async ")
    if not text.startswith("("):
        return None
    node = ast.parse(f"def _{text}: pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = [*node.args.posonlyargs, *node.args.args]
    return signature_of(node.args, bound=bool(arguments) and arguments[0].arg in ("self", "cls"))


def _difference(was: str, now: str) -> str:
    """Describes how two texts of the table differ."""
    before, after = parsed(was), parsed(now)
    if before is None or after is None:
        return "Its type, or what it is, has changed"
    parts = []
    added = [name for name in after.parameters if name not in before.parameters]
    gone = [name for name in before.parameters if name not in after.parameters]
    both = [name for name in before.parameters if name in after.parameters]
    lost = [
        name
        for name in both
        if before.parameters[name].default is not Signature.empty and after.parameters[name].default is Signature.empty
    ]
    for names, what in ((added, "new"), (gone, "gone"), (lost, "without its default now")):
        if names:
            parts.append(f"{'Parameters' if len(names) > 1 else 'Parameter'} {', '.join(names)}: {what}")
    if not parts and [one for one in after.parameters if one in both] != both:
        parts.append("The order of its parameters has changed")
    return "; ".join(parts) or "Types or defaults of its parameters, or its result, have changed"
