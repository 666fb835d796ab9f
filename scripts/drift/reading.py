"""Reads one module of this package: which members and names of other packages its code uses, and where."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scripts.drift.classes import CONSTRUCTOR, Class, Member, class_at, last_name
from scripts.drift.inference import Inference, Scope
from scripts.drift.source_tree import FUNCTIONS, Module, Place
from scripts.drift.types import UNKNOWN, Type, Types, elements, parameters_of, substituted

Found = Callable[[Member | Place | Class, ast.expr, bool], None]
"""A callback for a use (a class: its construction), the expression, and whether it is written."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_BINDING = (
    *(ast.AnnAssign, ast.Assign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.withitem, ast.Call, ast.match_case),
    *(ast.Import, ast.ImportFrom, *FUNCTIONS),
)


class Reading(ast.NodeVisitor):
    """Visits a module's code, with the types of its names. found: called for each use."""

    def __init__(self, module: Module, quiet: Inference, found: Found) -> None:
        self._tree, self._module, self._found = quiet.tree, module, found
        self._quiet = quiet
        self._inference = Inference(quiet.tree, self._seen, quiet)
        self._scope = Scope(module)
        self._parameters: dict[int, tuple[Types, ...]] = {}

    def run(self) -> None:
        """Reads the whole module."""
        self._block(self._module.tree.body)

    def _seen(self, member: Member | Place, node: ast.expr) -> None:
        is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        self._found(member, node, is_written)

    def _block(self, body: list[ast.stmt]) -> None:
        """Visits the statements of one scope: first their names, then their uses."""
        binding = [node for statement in body for node in _of_scope(statement) if isinstance(node, _BINDING)]
        # twice, so that a name of a loop's end is known at its beginning
        for node in (*binding, *binding):
            self._bind_node(node)
        for statement in body:
            self.visit(statement)

    @contextmanager
    def _inside(self, scope: Scope) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        yield
        self._scope = outer

    # types of names

    def _bind_node(self, node: ast.AST) -> None:
        quiet, scope = self._quiet, self._scope
        if isinstance(node, ast.AnnAssign):
            types = quiet.annotations.types(node.annotation, self._module, self._own_type())
            quiet.bind(node.target, types or quiet.types(node.value, scope), scope, replaces=False)
        elif isinstance(node, ast.Assign):
            types = quiet.types(node.value, scope)
            for target in node.targets:
                quiet.bind(target, types, scope, replaces=False)
        elif isinstance(node, ast.NamedExpr):
            quiet.bind(node.target, quiet.types(node.value, scope), scope, replaces=False)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            quiet.bind(node.target, elements(quiet.types(node.iter, scope)), scope, replaces=False)
            quiet.bind_texts(node.target, node.iter, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            entered = quiet.types(node.context_expr, scope)
            quiet.bind(node.optional_vars, elements(entered) or entered, scope, replaces=False)
        elif isinstance(node, ast.Call) and last_name(node.func) == "isinstance" and len(node.args) == 2:
            self._narrow(node.args[0], node.args[1])
        elif isinstance(node, ast.match_case) and isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern:
            if isinstance(node.pattern.pattern, ast.MatchClass) and node.pattern.name:
                scope.add(node.pattern.name, _instances(quiet.types(node.pattern.pattern.cls, scope)))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._module.bind_import(node)
        elif isinstance(node, FUNCTIONS) and node.name not in self._module.definitions:
            returned = quiet.annotations.types(node.returns, self._module, self._own_type())
            if returned:
                scope.add(node.name, frozenset({Type("callable", args=(returned,))}))

    def _narrow(self, tested: ast.expr, classes: ast.expr) -> None:
        each = classes.elts if isinstance(classes, ast.Tuple) else [classes]
        if isinstance(classes, ast.BinOp):
            each = [classes.left, classes.right]
        key = ast.unparse(tested)
        for one in each:
            found = _instances(self._quiet.types(one, self._scope))
            self._scope.narrowed[key] = self._scope.narrowed.get(key, UNKNOWN) | found

    def _own_type(self) -> Types:
        own = self._scope.own_class
        return UNKNOWN if own is None else _instances(self._quiet.of_name(own.name))

    # uses

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in (*node.bases, *node.decorator_list):
            self.visit(base)
        class_ = class_at(self._tree, f"{self._module.name}.{node.name}")
        known = class_ if class_ is not None and class_.node is node else Class(self._place(node), self._tree)
        with self._inside(self._scope.inner()):
            self._scope.own_class = known
            self._block(node.body)

    def _place(self, node: ast.ClassDef) -> Place:
        return Place(f"{self._module.name}.{node.name}", self._module, node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for one in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(one)
        own = self._scope.own_class if self._is_method(node) else None
        with self._inside(self._quiet.function_scope(node, self._scope, own)):
            returned = self._quiet.annotations.types(node.returns, self._module, self._own_type())
            for statement in node.body:
                for inner in _of_scope(statement):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        self._expect(inner.value, returned)
            self._block(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _is_method(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        own = self._scope.own_class
        return own is not None and any(node is one for one in _methods(own.node))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        scope = self._quiet.function_scope(node, self._scope, None)
        for argument, types in zip(node.args.args, self._parameters.get(id(node), ()), strict=False):
            scope.add(argument.arg, types)
        with self._inside(scope):
            for one in ast.walk(node.body):
                self._bind_node(one)
            self.visit(node.body)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        with self._inside(self._quiet.comprehension(node.generators, self._scope)):
            self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._expect(node.value, self._quiet.annotations.types(node.annotation, self._module, self._own_type()))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._inference.types(node, self._scope)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        # `getattr` and `hasattr` name a member
        self._inference.types(node, self._scope)
        if last_name(node.func) == "hasattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            for one in self._quiet.types(node.args[0], self._scope):
                self._inference.attribute(one, str(node.args[1].value), node)
        for one in self._quiet.types(node.func, self._scope):
            if one.kind == "class":
                class_ = class_at(self._tree, one.name)
                if class_ is not None:
                    self._found(class_, node, False)
                    self._expect_arguments(node, class_, {})
            elif one.kind == "function":
                self._called(one.name, node)
        if last_name(node.func) == "replace" and node.args:
            for one in self._quiet.types(node.args[0], self._scope):
                for keyword in node.keywords if one.kind == "instance" else ():
                    self._inference.attribute(one, keyword.arg or "", node)
        self.generic_visit(node)

    def _called(self, name: str, node: ast.Call) -> None:
        """Reports functions with their call; `Uses` reports members by the expression that reads them."""
        place = self._tree.find(name)
        if place is not None and isinstance(place.node, FUNCTIONS):
            self._found(place, node, False)
            self._expect_parameters(node, place.node, place.module)
            return
        owner, _, last = name.rpartition(".")
        class_ = class_at(self._tree, owner)
        member = None if class_ is None else class_.own_members.get(last)
        if member is not None:
            self._found(member, node, False)
            if isinstance(member.node, FUNCTIONS):
                self._expect_parameters(node, member.node, member.module, skip=not member.is_static)

    # parameters of lambdas, by their places

    def _expect(self, node: ast.expr, types: Types) -> None:
        if not types:
            return
        if isinstance(node, ast.Lambda):
            for one in types:
                if one.kind == "callable":
                    self._parameters[id(node)] = one.args[:-1]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            for inner in node.elts:
                self._expect(inner, elements(types))
        elif isinstance(node, ast.Dict):
            values = frozenset().union(*(one.args[1] for one in types if one.kind == "mapping"))
            for inner in node.values:
                self._expect(inner, values)
        elif isinstance(node, ast.IfExp):
            self._expect(node.body, types)
            self._expect(node.orelse, types)
        elif isinstance(node, ast.Call):
            for one in types:
                class_ = class_at(self._tree, one.name) if one.kind == "instance" and one.args else None
                if class_ is not None:
                    given = dict(zip(parameters_of(class_), one.args, strict=False))
                    self._expect_arguments(node, class_, given)

    def _expect_arguments(self, node: ast.Call, class_: Class, given: dict[str, Types]) -> None:
        made = class_.member(CONSTRUCTOR)
        if made is not None and isinstance(made.node, FUNCTIONS):
            self._expect_parameters(node, made.node, made.module, skip=True)
            return
        names = [] if class_.constructor is None else list(class_.constructor.parameters)
        pairs = [*zip(names, node.args, strict=False), *((one.arg, one.value) for one in node.keywords)]
        for name, value in pairs:
            member = class_.member(name or "")
            if member is not None:
                types = self._quiet.annotations.types(member.annotation, member.module)
                self._expect(value, substituted(types, given))

    def _expect_parameters(
        self,
        node: ast.Call,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        module: Module,
        *,
        skip: bool = False,
    ) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args][int(skip) :]
        named = {one.arg: one for one in (*arguments, *function.args.kwonlyargs)}
        pairs = [(one.annotation, value) for one, value in zip(arguments, node.args, strict=False)]
        pairs += [(named[one.arg].annotation, one.value) for one in node.keywords if one.arg in named]
        for annotation, value in pairs:
            if annotation is not None:
                self._expect(value, self._quiet.annotations.types(annotation, module))


def _instances(types: Types) -> Types:
    return frozenset(Type("instance", one.name, one.args) for one in types if one.kind == "class")


def _methods(node: ast.ClassDef) -> Iterator[ast.stmt]:
    """Functions of a class's body, also below `if`."""
    waiting = list(node.body)
    while waiting:
        one = waiting.pop()
        if isinstance(one, FUNCTIONS):
            yield one
        elif isinstance(one, (ast.If, ast.Try)):
            waiting += [*one.body, *one.orelse]


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a statement and its parts, without the bodies of functions and classes."""
    yield node
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _of_scope(child)
