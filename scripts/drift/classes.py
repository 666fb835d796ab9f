"""Classes in sources: bases, members, abstract ones, and how they are constructed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import Signature

from scripts.drift.signatures import signature_of, signature_of_fields, text_of, unquoted
from scripts.drift.source_tree import FUNCTIONS, Module, Place, SourceTree

CONSTRUCTOR = "__init__"
_DATA_DECORATORS = ("dataclass", "config")
_DATA_BASES = ("NamedTuple", "Struct", "BaseModel")


@dataclass(frozen=True)
class Member:
    """A name that a class has.

    owner: full name of the class that defines it. annotation: its type, a property's result; None if it has none.
    value: the assigned value. maker: the method that assigns it to `self`.
    """

    owner: str
    name: str
    kind: str  # method, property, field, attribute or class
    module: Module
    node: ast.AST
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    maker: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    @property
    def is_abstract(self) -> bool:
        return isinstance(self.node, FUNCTIONS) and any(
            name in ("abstractmethod", "abstractproperty") for name in decorators(self.node)
        )

    @property
    def is_static(self) -> bool:
        return isinstance(self.node, FUNCTIONS) and "staticmethod" in decorators(self.node)

    @property
    def signature(self) -> Signature | None:
        """Parameters without `self`; None if it is no method."""
        if self.kind != "method" or not isinstance(self.node, FUNCTIONS):
            return None
        return signature_of(self.node.args, bound=not self.is_static)

    @property
    def text(self) -> str:
        """Describes the member in one line."""
        if self.kind == "method" and isinstance(self.node, FUNCTIONS):
            return ("async " if isinstance(self.node, ast.AsyncFunctionDef) else "") + text_of(self.node)
        typed = unquoted(self.annotation)
        type_ = "" if typed is None else f": {ast.unparse(typed)}"
        # a default of a field decides whether callers must pass it; values of attributes are not a contract
        return self.kind + type_ + (" = ..." if self.kind == "field" and self.value is not None else "")


def decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The last names of its decorators."""
    return [last_name(one) for one in node.decorator_list]


def last_name(node: ast.expr) -> str:
    """`setter` of `@x.setter`, `dataclass` of `@dataclass(frozen=True)`."""
    if isinstance(node, (ast.Call, ast.Subscript)):
        return last_name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Class:
    """One class of a tree. Bases outside of the tree have no members here."""

    def __init__(self, place: Place, tree: SourceTree) -> None:
        assert isinstance(place.node, ast.ClassDef)
        self.name, self.module, self.node = place.name, place.module, place.node
        self._tree = tree

    @cached_property
    def bases(self) -> list[Class]:
        found = (named(self._tree, self.module, base) for base in self.node.bases)
        return [class_ for name in found if name is not None and (class_ := class_at(self._tree, name)) is not None]

    @cached_property
    def family(self) -> list[Class]:
        """The class and its bases, in the order in which a member is looked up."""
        found: dict[str, Class] = {}
        for base in self.bases:
            for one in base.family:
                # a base shared by several comes after all of them
                found.pop(one.name, None)
                found[one.name] = one
        return [self, *found.values()]

    @cached_property
    def own_members(self) -> dict[str, Member]:
        """Members that its own body defines, or its methods assign to `self`."""
        members: dict[str, Member] = {}
        for member in (*self._declared(self.node.body), *self._assigned()):
            members.setdefault(member.name, member)
        return members

    def _declared(self, body: list[ast.stmt]) -> Iterator[Member]:
        for node in body:
            if isinstance(node, FUNCTIONS):
                names = decorators(node)
                if "setter" in names or "deleter" in names or "overload" in names:
                    continue
                is_property = any(name in ("property", "cached_property", "abstractproperty") for name in names)
                kind = "property" if is_property else "method"
                yield Member(self.name, node.name, kind, self.module, node, node.returns if is_property else None)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield Member(self.name, node.target.id, "field", self.module, node, node.annotation, node.value)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield Member(self.name, target.id, "attribute", self.module, node, None, node.value)
            elif isinstance(node, ast.ClassDef):
                yield Member(self.name, node.name, "class", self.module, node)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from self._declared([*node.body, *getattr(node, "orelse", [])])

    def _assigned(self) -> Iterator[Member]:
        methods = [node for node in self.node.body if isinstance(node, FUNCTIONS) and node.args.args]
        for method in sorted(methods, key=lambda one: one.name != CONSTRUCTOR):
            own = method.args.args[0].arg
            for node in ast.walk(method):
                if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                    continue
                for target, value in _targets(node):
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == own
                    ):
                        typed = node.annotation if isinstance(node, ast.AnnAssign) else None
                        yield Member(self.name, target.attr, "attribute", self.module, node, typed, value, method)

    def member(self, name: str) -> Member | None:
        """The member of this name, own or inherited; the one with a type, if a subclass only assigns a value."""
        found = [one.own_members[name] for one in self.family if name in one.own_members]
        typed = (one for one in found if one.kind != "attribute" or one.annotation is not None)
        return next(typed, found[0]) if found else None

    def names(self) -> set[str]:
        """Names of all members."""
        return {name for one in self.family for name in one.own_members}

    def missing(self) -> set[str]:
        """Abstract members that neither the class nor a base defines."""
        first: dict[str, Member] = {}
        for one in self.family:
            for name, member in one.own_members.items():
                first.setdefault(name, member)
        return {name for name, member in first.items() if member.is_abstract}

    @property
    def is_data(self) -> bool:
        """True if its fields are the parameters of its constructor."""
        return any(
            any(name in _DATA_DECORATORS for name in decorators(one.node))
            or any(last_name(base) in _DATA_BASES for base in one.node.bases)
            for one in self.family
        )

    @property
    def constructor(self) -> Signature | None:
        """Parameters without `self`; None if they are not known."""
        one = self._constructing
        if one is None:
            return None
        written = one.own_members.get(CONSTRUCTOR)
        return written.signature if written else signature_of_fields(one._fields())

    @property
    def _constructing(self) -> Class | None:
        """Returns the class of the family that defines how instances are made: by a constructor, or by its fields."""
        return next((one for one in self.family if CONSTRUCTOR in one.own_members or one.is_data), None)

    def _fields(self) -> Iterator[tuple[str, bool, bool]]:
        fields: dict[str, tuple[str, bool, bool]] = {}
        for one in reversed(self.family):
            by_name = any(
                keyword.arg == "kw_only" and isinstance(keyword.value, ast.Constant) and bool(keyword.value.value)
                for call in (*one.node.decorator_list, one.node)
                for keyword in getattr(call, "keywords", [])
            )
            for name, member in one.own_members.items():
                if member.kind == "field" and member.maker is None and last_name_of(member.annotation) != "ClassVar":
                    if _is_left_out(member.value):
                        fields.pop(name, None)
                    else:
                        fields[name] = (name, _has_default(member.value), by_name)
        return iter(fields.values())

    @property
    def text(self) -> str:
        """Describes the class in one line: its bases, and its abstract members."""
        bases = ", ".join(ast.unparse(base) for base in self.node.bases)
        abstract = ", ".join(sorted(self.missing()))
        return f"class({bases})" + (f", abstract: {abstract}" if abstract else "")

    @property
    def constructor_text(self) -> str | None:
        """Returns the constructor as written; for a dataclass, its fields."""
        one = self._constructing
        if one is None:
            return None
        if CONSTRUCTOR in one.own_members:
            return one.own_members[CONSTRUCTOR].text
        shown = [name + (" = ..." if has_default else "") for name, has_default, _ in one._fields()]
        return f"fields({', '.join(shown)})"


def last_name_of(annotation: ast.expr | None) -> str:
    return "" if annotation is None else last_name(annotation)


def _has_default(value: ast.expr | None) -> bool:
    """`field(...)` is a default only if it has one."""
    if isinstance(value, ast.Call) and last_name(value.func) in ("field", "Field"):
        keywords = {keyword.arg for keyword in value.keywords}
        return bool(keywords & {"default", "default_factory"}) or (
            last_name(value.func) == "Field" and bool(value.args)
        )
    return value is not None


def _is_left_out(value: ast.expr | None) -> bool:
    """`field(init=False)` is no parameter."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return any(one.arg == "init" and isinstance(one.value, ast.Constant) and not one.value.value for one in keywords)


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target with its value; several on both sides are taken one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
            yield from zip(target.elts, values, strict=False)
        else:
            yield target, node.value


def named(tree: SourceTree, module: Module, node: ast.expr) -> str | None:
    """Returns the full name of the object that an expression such as `config.VllmConfig` names in a module; None if
    there is none.
    """
    if isinstance(node, ast.Subscript):
        return named(tree, module, node.value)
    if isinstance(node, ast.Attribute):
        owner = named(tree, module, node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    if not isinstance(node, ast.Name):
        return None
    if node.id in module.definitions:
        return f"{module.name}.{node.id}"
    return tree.chosen(module.imports.get(node.id, []))


@cache
def class_at(tree: SourceTree, name: str) -> Class | None:
    """The class of this full name, through imports; None if there is none."""
    place = tree.find(name)
    return Class(place, tree) if place is not None and isinstance(place.node, ast.ClassDef) else nested_at(tree, name)


def nested_at(tree: SourceTree, name: str) -> Class | None:
    """A class in the body of another one."""
    owner, _, last = name.rpartition(".")
    if not owner or tree.module(owner) is not None or not tree.owns(owner):
        return None
    outer = class_at(tree, owner)
    member = None if outer is None else outer.member(last)
    if member is None or not isinstance(member.node, ast.ClassDef):
        return None
    return Class(Place(f"{member.owner}.{last}", member.module, member.node), tree)
