"""Types of expressions, and the members of classes that they read, call and write."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scripts.drift.classes import Class, Member, class_at, decorators, last_name, named
from scripts.drift.source_tree import FUNCTIONS, Module, Place, SourceTree
from scripts.drift.types import (
    UNKNOWN,
    Annotations,
    Type,
    Types,
    elements,
    instance,
    items,
    mapping,
    parameters_of,
    substituted,
)

_ELEMENTS_OF_FIRST = frozenset(("list", "tuple", "sorted", "set", "frozenset", "reversed", "iter", "deque"))
_SAME_AS_FIRST = frozenset(("replace", "copy", "deepcopy", "partial", "dict"))
_ONE_OF_FIRST = frozenset(("next", "min", "max"))


@dataclass
class Scope:
    """Names of a function, or of a module's top, and their types. narrowed: of expressions that were tested."""

    module: Module
    own_class: Class | None = None
    names: dict[str, Types] = field(default_factory=dict)
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    narrowed: dict[str, Types] = field(default_factory=dict)

    def inner(self, own_class: Class | None = None) -> Scope:
        """A scope inside this one, which sees its names."""
        known = own_class or self.own_class
        return Scope(self.module, known, dict(self.names), dict(self.texts), dict(self.narrowed))

    def add(self, name: str, types: Types) -> None:
        self.names[name] = self.names.get(name, UNKNOWN) | types


Seen = Callable[[Member | Place, ast.expr], None]
"""A callback for each member or name that an expression uses, and the expression."""


class Inference:
    """Types of expressions in one tree.

    seen: called for each use, as often as an expression is visited. quiet: an inference without callbacks, whose
    results are reused.
    """

    def __init__(self, tree: SourceTree, seen: Seen | None = None, quiet: Inference | None = None) -> None:
        self.tree = tree
        self.annotations = Annotations(tree)
        self._seen = seen or (lambda member, node: None)
        # the definition of a variable or a member does not count as a use by its readers
        self.quiet: Inference = quiet or self
        self._busy: set[tuple[str, str]] = set() if quiet is None else quiet._busy
        self._members: dict[tuple[str, str, tuple[Types, ...]], Types] = {} if quiet is None else quiet._members

    def types(self, node: ast.expr | None, scope: Scope) -> Types:
        """Returns the possible types of an expression."""
        if node is None:
            return UNKNOWN
        known = getattr(self, f"_{type(node).__name__}", None)
        found: Types = known(node, scope) if known is not None else UNKNOWN
        if scope.narrowed and isinstance(node, (ast.Name, ast.Attribute)):
            found |= scope.narrowed.get(ast.unparse(node), UNKNOWN)
        return found

    # names

    def _Name(self, node: ast.Name, scope: Scope) -> Types:
        if node.id in scope.names:
            return scope.names[node.id]
        name = named(self.tree, scope.module, node)
        return UNKNOWN if name is None else self.of_name(name, node)

    def of_name(self, name: str, node: ast.expr | None = None) -> Types:
        """Returns the type of the object of a full name: a module, a class, a function or a variable."""
        if not self.tree.owns(name):
            return UNKNOWN
        class_ = class_at(self.tree, name)
        if class_ is not None:
            return frozenset({Type("class", class_.name)})
        place = self.tree.find(name)
        if place is None:
            return UNKNOWN
        if node is not None and isinstance(node, ast.Attribute):
            self._seen(place, node)
        if isinstance(place.node, ast.Module):
            return frozenset({Type("module", place.name)})
        if isinstance(place.node, FUNCTIONS):
            return frozenset({Type("function", place.name)})
        return self._variable(place)

    def _variable(self, place: Place) -> Types:
        key = (place.name, "")
        if key in self._busy:
            return UNKNOWN
        self._busy.add(key)
        try:
            if isinstance(place.node, ast.AnnAssign):
                return self.annotations.types(place.node.annotation, place.module)
            value = getattr(place.node, "value", None)
            return self.quiet.types(value, Scope(place.module))
        finally:
            self._busy.discard(key)

    # members

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Types:
        found: set[Type] = set()
        for one in self.types(node.value, scope):
            found |= self.attribute(one, node.attr, node)
        return frozenset(found)

    def attribute(self, owner: Type, name: str, node: ast.expr) -> Types:
        """The type of a member, which counts as used."""
        if owner.kind == "module":
            return self.of_name(f"{owner.name}.{name}", node)
        if owner.kind not in ("instance", "class", "super"):
            return UNKNOWN
        class_ = class_at(self.tree, owner.name)
        if class_ is None:
            return UNKNOWN
        member = self._above(class_, name) if owner.kind == "super" else class_.member(name)
        if member is None:
            return UNKNOWN
        self._seen(member, node)
        of_class = owner.kind == "class" and member.kind == "attribute" and member.maker is None
        if of_class and any(last_name(base).endswith("Enum") for one in class_.family for base in one.node.bases):
            return instance(owner.name)
        return self._member(member, owner, class_)

    def _above(self, class_: Class, name: str) -> Member | None:
        found = (one.own_members[name] for one in class_.family[1:] if name in one.own_members)
        return next(found, None)

    def _member(self, member: Member, owner: Type, class_: Class) -> Types:
        if member.kind == "method":
            return frozenset({Type("function", f"{member.owner}.{member.name}", (frozenset({owner}),))})
        key = (member.owner, member.name)
        if key in self._busy:
            return UNKNOWN
        if (*key, owner.args) not in self._members:
            self._busy.add(key)
            try:
                self._members[(*key, owner.args)] = self._value(member, owner, class_)
            finally:
                self._busy.discard(key)
        return self._members[(*key, owner.args)]

    def _value(self, member: Member, owner: Type, class_: Class) -> Types:
        if member.kind == "class":
            return frozenset({Type("class", f"{member.owner}.{member.name}")})
        if member.annotation is not None:
            own = frozenset({Type("instance", owner.name, owner.args)})
            found = self.annotations.types(member.annotation, member.module, own)
            return substituted(found, dict(zip(parameters_of(class_), owner.args, strict=False)))
        scope = Scope(member.module)
        if member.maker is not None:
            scope = self.function_scope(member.maker, scope, class_at(self.tree, member.owner))
        return self.quiet.types(member.value, scope)

    def function_scope(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, outer: Scope, own_class: Class | None
    ) -> Scope:
        """A scope with the parameters of a function; `own_class` if it is a method."""
        scope = outer.inner(own_class)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self_type = UNKNOWN if scope.own_class is None else instance(scope.own_class.name)
        for argument in arguments:
            scope.names[argument.arg] = self.annotations.types(argument.annotation, scope.module, self_type)
        if node.args.vararg:
            scope.names[node.args.vararg.arg] = items(
                self.annotations.types(node.args.vararg.annotation, scope.module, self_type)
            )
        if node.args.kwarg:
            scope.names[node.args.kwarg.arg] = UNKNOWN
        if own_class is not None and arguments and isinstance(node, FUNCTIONS):
            names = decorators(node)
            if "classmethod" in names or node.name == "__new__":
                scope.names[arguments[0].arg] = frozenset({Type("class", own_class.name)})
            elif "staticmethod" not in names:
                scope.names[arguments[0].arg] = self_type
        return scope

    # calls

    def _Call(self, node: ast.Call, scope: Scope) -> Types:
        builtin = self._builtin(node, scope)
        if builtin is not None:
            return builtin
        found: set[Type] = set()
        for one in self.types(node.func, scope):
            found |= self._called(one, node, scope)
        if isinstance(node.func, ast.Attribute):
            for one in self.types(node.func.value, scope):
                found |= _of_container(one, node.func.attr)
        return frozenset(found)

    def _called(self, function: Type, node: ast.Call, scope: Scope) -> Types:
        if function.kind == "class":
            return instance(function.name, function.args)
        if function.kind == "callable":
            return function.args[-1]
        if function.kind != "function":
            return UNKNOWN
        owner = next(iter(function.args[0])) if function.args else None
        class_name, _, name = function.name.rpartition(".")
        class_ = None if owner is None else class_at(self.tree, class_name)
        if class_ is None:
            place = self.tree.find(function.name)
            if place is None or not isinstance(place.node, FUNCTIONS):
                return UNKNOWN
            return self._result(place.node, place.module, UNKNOWN)
        member = class_.own_members.get(name)
        if member is None or not isinstance(member.node, FUNCTIONS):
            return UNKNOWN
        assert owner is not None
        result = self._result(member.node, member.module, instance(owner.name, owner.args))
        return substituted(result, dict(zip(parameters_of(class_), owner.args, strict=False)))

    def _result(self, node: ast.FunctionDef | ast.AsyncFunctionDef, module: Module, self_type: Types) -> Types:
        return self.annotations.types(node.returns, module, self_type)

    def _builtin(self, node: ast.Call, scope: Scope) -> Types | None:
        """Result of a function that is known by its name; None if it is none of them."""
        name = last_name(node.func)
        is_plain = isinstance(node.func, ast.Name) or isinstance(getattr(node.func, "value", None), ast.Name)
        if not is_plain or (isinstance(node.func, ast.Name) and node.func.id in scope.names):
            return None
        if name == "super" and scope.own_class is not None:
            return frozenset({Type("super", scope.own_class.name)})
        if isinstance(node.func, ast.Attribute) and self.types(node.func.value, scope):
            return None
        if not node.args:
            return None
        if name == "cast" and len(node.args) == 2:
            return self.annotations.types(node.args[0], scope.module)
        first = self.types(node.args[0], scope)
        if name == "getattr":
            names = self._texts(node.args[1], scope)
            return frozenset().union(*(self.attribute(one, text, node) for one in first for text in names))
        if name == "type" and len(node.args) == 1:
            return frozenset(Type("class", one.name, one.args) for one in first if one.kind == "instance")
        if name in _ELEMENTS_OF_FIRST:
            return items(elements(first))
        if name in _SAME_AS_FIRST:
            return first
        if name in _ONE_OF_FIRST:
            others = (self.types(one, scope) for one in node.args[1:])
            return frozenset().union(first if len(node.args) > 2 else elements(first), *others)
        if name == "enumerate":
            return items(frozenset({Type("tuple", args=(UNKNOWN, elements(first)))}))
        if name == "zip":
            each = tuple(elements(self.types(one, scope)) for one in node.args)
            return items(frozenset({Type("tuple", args=each)}))
        if name in ("map", "filter") and len(node.args) > 1:
            inner = elements(self.types(node.args[1], scope))
            if name == "filter":
                return items(inner)
            return items(frozenset().union(*(self._called(one, node, scope) for one in first)))
        return None

    def _texts(self, node: ast.expr, scope: Scope) -> tuple[str, ...]:
        """Strings that an expression may be: a constant, or a loop's variable over constants."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return (node.value,)
        return scope.texts.get(node.id, ()) if isinstance(node, ast.Name) else ()

    # the others

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Types:
        found: set[Type] = set()
        for one in self.types(node.value, scope):
            if one.kind == "class" or isinstance(node.slice, ast.Slice):
                found.add(one)
            elif one.kind == "mapping":
                found |= one.args[1]
            elif one.kind == "tuple" and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                found |= one.args[node.slice.value] if -len(one.args) <= node.slice.value < len(one.args) else UNKNOWN
            else:
                found |= elements(frozenset({one}))
        return frozenset(found)

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Types:
        return frozenset().union(*(self.types(one, scope) for one in node.values))

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Types:
        return self.types(node.body, scope) | self.types(node.orelse, scope)

    def _NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Types:
        return self.types(node.value, scope)

    def _Await(self, node: ast.Await, scope: Scope) -> Types:
        return self.types(node.value, scope)

    def _BinOp(self, node: ast.BinOp, scope: Scope) -> Types:
        return self.types(node.left, scope) | self.types(node.right, scope)

    def _Lambda(self, node: ast.Lambda, scope: Scope) -> Types:
        return frozenset({Type("callable", args=(self.types(node.body, scope),))})

    def _List(self, node: ast.List | ast.Set, scope: Scope) -> Types:
        found: set[Type] = set()
        for one in node.elts:
            inner = one.value if isinstance(one, ast.Starred) else one
            types = self.types(inner, scope)
            found |= elements(types) if isinstance(one, ast.Starred) else types
        return items(frozenset(found))

    _Set = _List

    def _Tuple(self, node: ast.Tuple, scope: Scope) -> Types:
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return self._List(ast.List(node.elts), scope)
        each = tuple(self.types(one, scope) for one in node.elts)
        return frozenset({Type("tuple", args=each)}) if any(each) else UNKNOWN

    def _Dict(self, node: ast.Dict, scope: Scope) -> Types:
        keys = frozenset().union(*(self.types(one, scope) for one in node.keys if one is not None))
        values = (self.types(one, scope) for key, one in zip(node.keys, node.values, strict=True) if key is not None)
        return mapping(keys, frozenset().union(*values))

    def _ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Types:
        return items(self.types(node.elt, self.comprehension(node.generators, scope)))

    _SetComp = _GeneratorExp = _ListComp

    def _DictComp(self, node: ast.DictComp, scope: Scope) -> Types:
        inner = self.comprehension(node.generators, scope)
        return mapping(self.types(node.key, inner), self.types(node.value, inner))

    def comprehension(self, generators: Iterable[ast.comprehension], scope: Scope) -> Scope:
        """A scope with the variables of a comprehension."""
        inner = scope.inner()
        for one in generators:
            self.bind(one.target, elements(self.types(one.iter, inner)), inner)
            self.bind_texts(one.target, one.iter, inner)
        return inner

    def bind(self, target: ast.expr, types: Types, scope: Scope, *, replaces: bool = True) -> None:
        """Binds the names of a target to their types. replaces: earlier types of the name do not count."""
        if isinstance(target, ast.Name):
            if replaces:
                scope.names[target.id] = types
            else:
                scope.add(target.id, types)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, items(types), scope, replaces=replaces)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for number, one in enumerate(target.elts):
                found: set[Type] = set()
                for type_ in types:
                    if type_.kind == "tuple":
                        found |= type_.args[number] if number < len(type_.args) else UNKNOWN
                    else:
                        found |= elements(frozenset({type_}))
                self.bind(one, frozenset(found), scope, replaces=replaces)

    def bind_texts(self, target: ast.expr, source: ast.expr, scope: Scope) -> None:
        """Remembers the strings that a loop's variable takes."""
        if isinstance(source, ast.Name):
            name = named(self.tree, scope.module, source)
            place = None if name is None else self.tree.find(name)
            source = source if place is None else getattr(place.node, "value", None) or source
        if isinstance(target, ast.Name) and isinstance(source, (ast.Tuple, ast.List, ast.Set)):
            texts = [one.value for one in source.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            scope.texts[target.id] = tuple(texts)


def _of_container(owner: Type, method: str) -> Types:
    """The result of a container's method."""
    if owner.kind == "mapping":
        keys, values = owner.args
        if method in ("get", "pop", "setdefault", "__getitem__"):
            return values
        if method == "values":
            return items(values)
        if method == "items":
            return items(frozenset({Type("tuple", args=(keys, values))}))
        if method == "popitem":
            return frozenset({Type("tuple", args=(keys, values))})
        return items(keys) if method == "keys" else frozenset({owner}) if method == "copy" else UNKNOWN
    if owner.kind == "items":
        if method in ("pop", "popleft", "get", "get_nowait", "__enter__"):
            return owner.args[0]
        return frozenset({owner}) if method in ("copy", "union", "difference", "intersection") else UNKNOWN
    return UNKNOWN
