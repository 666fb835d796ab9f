"""Types as far as annotations tell: classes of the packages that are read, and containers of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from scripts.drift.classes import Class, class_at, last_name, named, unquoted
from scripts.drift.source_tree import FUNCTIONS, Module, SourceTree


@dataclass(frozen=True)
class Type:
    """One type. kind: an instance of a class, a class, a function, a module, a container or a type variable.

    name: of class, function, module or variable. args: of a container its elements; of a mapping keys and values; of a
    callable its parameters and its result; of an instance the arguments of a generic class.
    """

    kind: str
    name: str = ""
    args: tuple[Types, ...] = ()


Types = frozenset[Type]
"""The possible types of an expression; empty if unknown."""

UNKNOWN: Types = frozenset()
_ITEMS = frozenset(
    (
        *(
            "list",
            "List",
            "set",
            "Set",
            "frozenset",
            "FrozenSet",
            "Sequence",
            "MutableSequence",
            "Iterable",
            "Iterator",
        ),
        *(
            "Collection",
            "deque",
            "Deque",
            "AbstractSet",
            "Generator",
            "AsyncIterator",
            "AsyncIterable",
            "AsyncGenerator",
        ),
        *("KeysView", "ValuesView", "AbstractContextManager", "ContextManager", "ConstantList"),
    )
)
_MAPPINGS = frozenset(("dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict"))
_SAME = frozenset(("Annotated", "ClassVar", "Final", "Required", "NotRequired", "ReadOnly", "Awaitable", "Optional"))


def instance(name: str, args: tuple[Types, ...] = ()) -> Types:
    return frozenset({Type("instance", name, args)})


def items(inner: Types) -> Types:
    return frozenset({Type("items", args=(inner,))}) if inner else UNKNOWN


def mapping(keys: Types, values: Types) -> Types:
    return frozenset({Type("mapping", args=(keys, values))}) if keys or values else UNKNOWN


def elements(types: Types) -> Types:
    """Returns the types of elements from iterating."""
    found: set[Type] = set()
    for one in types:
        if one.kind == "tuple":
            found.update(*one.args)
        elif one.kind in ("items", "mapping"):
            found |= one.args[0]
    return frozenset(found)


def substituted(types: Types, given: dict[str, Types]) -> Types:
    """The same with type variables replaced."""
    if not given or not types:
        return types
    found: set[Type] = set()
    for one in types:
        if one.kind == "variable":
            found |= given.get(one.name, UNKNOWN)
        else:
            found.add(Type(one.kind, one.name, tuple(substituted(arg, given) for arg in one.args)))
    return frozenset(found)


def parameters_of(class_: Class) -> list[str]:
    """Full names of the type variables of a generic class."""
    own = [f"{class_.module.name}.{one.name}" for one in getattr(class_.node, "type_params", [])]
    for base in class_.node.bases:
        if isinstance(base, ast.Subscript) and last_name(base.value) in ("Generic", "Protocol"):
            names = base.slice.elts if isinstance(base.slice, ast.Tuple) else [base.slice]
            own += [f"{class_.module.name}.{last_name(one)}" for one in names]
    return own


class Annotations:
    """Types from annotations, in their module."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._busy: set[str] = set()

    def types(self, node: ast.expr | None, module: Module, self_type: Types = UNKNOWN) -> Types:
        """Returns the types of an annotation. self_type: the type of `Self`."""
        node = unquoted(node)
        if isinstance(node, ast.BinOp):
            return self.types(node.left, module, self_type) | self.types(node.right, module, self_type)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, module, self_type)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self_type if last_name(node) == "Self" else self._name(node, module, self_type)
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, module: Module, self_type: Types) -> Types:
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = last_name(node.value)
        if name == "Literal" or not inner:
            return UNKNOWN
        if name == "Callable":
            given = inner[0].elts if isinstance(inner[0], ast.List) else []
            args = tuple(self.types(one, module, self_type) for one in (*given, inner[-1]))
            return frozenset({Type("callable", args=args)})
        args = tuple(self.types(one, module, self_type) for one in inner)
        if name in ("tuple", "Tuple"):
            if isinstance(inner[-1], ast.Constant) and inner[-1].value is Ellipsis:
                return items(args[0])
            return frozenset({Type("tuple", args=args)}) if any(args) else UNKNOWN
        if name in ("type", "Type"):
            return frozenset(Type("class", one.name) for one in args[0] if one.kind == "instance")
        if name == "Union":
            return frozenset().union(*args)
        if name == "Coroutine":
            return args[-1]
        if name in _SAME:
            return args[0]
        own = named(self._tree, module, node.value)
        class_ = None if own is None else class_at(self._tree, own)
        if class_ is not None:
            return instance(class_.name, args)
        if name in _MAPPINGS:
            return mapping(args[0], args[-1])
        return items(args[0]) if name in _ITEMS else UNKNOWN

    def _name(self, node: ast.expr, module: Module, self_type: Types) -> Types:
        name = named(self._tree, module, node)
        if name is None or not self._tree.owns(name):
            return UNKNOWN
        class_ = class_at(self._tree, name)
        if class_ is not None:
            return instance(class_.name)
        place = self._tree.find(name)
        if place is None or place.name in self._busy:
            return UNKNOWN
        value = getattr(place.node, "value", None)
        if isinstance(place.node, FUNCTIONS) or not isinstance(value, ast.expr):
            return UNKNOWN
        if isinstance(value, ast.Call):
            # a variable that also stands for its class or its bound until it is replaced
            bound = next((one.value for one in value.keywords if one.arg == "bound"), None)
            is_variable = last_name(value.func) == "TypeVar"
            variable = frozenset({Type("variable", place.name)}) if is_variable else UNKNOWN
            return variable | self.types(bound, place.module, self_type)
        self._busy.add(place.name)
        try:
            return self.types(value, place.module, self_type)
        finally:
            self._busy.discard(place.name)
