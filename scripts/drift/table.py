"""The rows of `contracts.toml`: made from the code's uses and the sources of supported versions."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path

from scripts.drift.classes import CONSTRUCTOR, Class, Member, class_at
from scripts.drift.contracts import CONDITIONS, Contract
from scripts.drift.signatures import signature_of, text_of, unquoted
from scripts.drift.source_tree import FUNCTIONS, Place, SourceTree
from scripts.drift.uses import Use, Uses

HEADER = """\
# What vllm-gaudi-ucm relies on in vLLM. `make contracts` writes it; scripts/drift/contracts.py has the conditions.
# is: signature, type or kind, one for each that a supported version has. by: how it is used, and by which files.
# optional: the code runs without it. instead: one of these is enough. defined: where an imported name is defined.
"""
_DERIVES = ("derives",)


@dataclass(frozen=True)
class Described:
    """A name in one version. text: its text in the table. signature: None if it cannot be called, or is not known."""

    text: str
    kind: str
    signature: Signature | None = None
    unbound: Signature | None = None
    defined: str = ""
    class_: Class | None = None


class Version:
    """The sources of one version of vLLM, asked for rows. renamed: classes that the table knows by another place."""

    def __init__(self, tree: SourceTree, contracts: Iterable[Contract] = ()) -> None:
        self.tree = tree
        self._imported: dict[str, list[str]] = {}
        for contract in contracts:
            for place in contract.defined:
                self._imported.setdefault(place, []).append(contract.name)

    def described(self, name: str, member: str, *, derived: bool = False) -> Described | None:
        """The name, or the member of a class, in this version; None if it is not there."""
        if not member:
            place = self.place(name)
            return None if place is None else describe_place(place, self.tree, derived=derived)
        class_ = self.class_(name)
        if class_ is None:
            return None
        if member == CONSTRUCTOR:
            text = class_.constructor_text
            return None if text is None else Described(text, "method", class_.constructor)
        found = class_.member(member)
        return None if found is None else describe_member(found)

    def class_(self, name: str) -> Class | None:
        """The class that the table has at this place, wherever this version defines it."""
        found = class_at(self.tree, name)
        if found is not None:
            return found
        place = self.place(name)
        return None if place is None else class_at(self.tree, place.name)

    def place(self, name: str) -> Place | None:
        """The definition of a name, by the places that it is imported from, too."""
        found = self.tree.find(name)
        if found is not None:
            return found
        imported = self._imported.get(name, [])
        places = [place for one in imported if (place := self.tree.find(one)) is not None]
        if places or imported:
            return places[0] if places else None
        # met as the type of something only, so its place does not matter
        if name.rpartition(".")[2][:1].isupper():
            others = self.tree.elsewhere("vllm", name.rpartition(".")[2])
            return self.tree.find(others[0]) if len(others) == 1 else None
        return None


def describe_place(place: Place, tree: SourceTree, *, derived: bool) -> Described:
    node = place.node
    if isinstance(node, ast.Module):
        return Described("module", "module", defined=place.name)
    if isinstance(node, ast.ClassDef):
        class_ = Class(place, tree)
        return Described(class_.text if derived else "class", "class", class_.constructor, None, place.name, class_)
    if isinstance(node, FUNCTIONS):
        text = ("async " if isinstance(node, ast.AsyncFunctionDef) else "") + text_of(node)
        return Described(text, "function", signature_of(node.args), None, place.name)
    typed = unquoted(node.annotation) if isinstance(node, ast.AnnAssign) else None
    return Described("variable" + ("" if typed is None else f": {ast.unparse(typed)}"), "variable", defined=place.name)


def describe_member(member: Member) -> Described:
    unbound = None
    if member.kind == "method" and isinstance(member.node, FUNCTIONS):
        unbound = signature_of(member.node.args)
    return Described(member.text, member.kind, member.signature, unbound)


class Rows:
    """Makes the rows. versions: oldest first, each with the code's uses by its types."""

    def __init__(self, versions: Sequence[tuple[SourceTree, Uses]]) -> None:
        self._trees = [tree for tree, _ in versions]
        self.uses: dict[tuple[str, str], list[Use]] = {}
        self._alternatives: dict[str, frozenset[str]] = {}
        for _, uses in versions:
            for key, every in uses.by_key().items():
                self.uses.setdefault(key, []).extend(every)
            for name, others in uses.alternatives.items():
                self._alternatives[name] = self._alternatives.get(name, frozenset()) | others

    def contracts(self) -> dict[tuple[str, str], Contract]:
        """Returns all rows, sorted, without names that no version has, which are in `unknown`."""
        self._imported = [self._contract(key) for key in sorted(self.uses) if not key[1]]
        known = [contract for contract in self._imported if contract is not None]
        self._versions = [Version(tree, known) for tree in self._trees]
        rows = (self._contract(key) for key in sorted(self.uses))
        return {row.key: row for row in rows if row is not None}

    def _contract(self, key: tuple[str, str]) -> Contract | None:
        name, member = key
        every = self.uses[key]
        derived = any(use.how == "derives" for use in every)
        versions = getattr(self, "_versions", None) or [Version(tree) for tree in self._trees]
        found = [one.described(name, member, derived=derived) for one in versions]
        there = [one for one in found if one is not None]
        if not there:
            return None
        users: dict[str, set[str]] = {}
        for use in every:
            users.setdefault(use.how, set()).add(use.file)
        full_name = f"{name}.{member}" if member else name
        optional = all(use.is_guarded for use in every) or full_name in CONDITIONS
        defined = dict.fromkeys(one.defined for one in there if one.defined not in ("", name))
        return Contract(
            name,
            member,
            tuple(dict.fromkeys(one.text for one in there)),
            tuple((how, tuple(sorted(users[how]))) for how in sorted(users)),
            optional,
            self._instead(name) if optional and not member else (),
            tuple(defined),
        )

    def _instead(self, name: str) -> tuple[str, ...]:
        """Other names of which one is enough; of a module of which there are two, its names in the other."""
        module, _, last = name.rpartition(".")
        in_others = (f"{other}.{last}" for other in self._alternatives.get(module, ()))
        return tuple(sorted({*self._alternatives.get(name, ()), *in_others}))

    def unknown(self) -> list[tuple[str, str]]:
        """Imported names that no version has."""
        contracts = self.contracts()
        return [key for key in sorted(self.uses) if key not in contracts]


def write(contracts: Iterable[Contract], file: Path) -> None:
    """Writes the table: one line for each row, in the order of their names."""
    file.write_text("".join(_lines(contracts)), encoding="utf-8")


def _lines(contracts: Iterable[Contract]) -> Iterator[str]:
    yield HEADER
    last = None
    for contract in sorted(contracts, key=lambda one: one.key):
        if contract.name != last:
            last = contract.name
            yield f"\n[{_text(contract.name)}]\n"
        by = ", ".join(f"{how} = {_list(files)}" for how, files in contract.users)
        parts = [f"is = {_list(contract.what)}", f"by = {{ {by} }}"]
        parts += ["optional = true"] if contract.is_optional else []
        parts += [f"instead = {_list(contract.instead)}"] if contract.instead else []
        parts += [f"defined = {_list(contract.defined)}"] if contract.defined else []
        yield f"{_key(contract.member)} = {{ {', '.join(parts)} }}\n"


def _list(texts: Iterable[str]) -> str:
    return "[" + ", ".join(_text(text) for text in texts) + "]"


def _text(text: str) -> str:
    # a JSON string is a TOML string
    return json.dumps(text, ensure_ascii=False)


def _key(member: str) -> str:
    return member if member.isidentifier() and member.isascii() else _text(member)
