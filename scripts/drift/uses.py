"""Finds the code's uses of vLLM: names it imports, and members it overrides, calls, reads and writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from scripts.drift.classes import CONSTRUCTOR, Class, Member, class_at, last_name
from scripts.drift.inference import Inference
from scripts.drift.reading import Reading
from scripts.drift.signatures import Call
from scripts.drift.source_tree import Module, Place, SourceTree, imported_names

ROOT = Path(__file__).resolve().parents[2]
OURS = "vllm_gaudi_ucm"
TOOLS = "vllm_gaudi_ucm_tools"
VLLM = "vllm"
_ASKS = ("hasattr", "getattr", "find_spec", "signature")
_NOT_THERE = ("ImportError", "ModuleNotFoundError", "AttributeError")


@dataclass(frozen=True)
class Use:
    """One use of one name.

    name: full name of the imported object, or of the class whose member is used. member: empty for an imported name.
    how: imports, derives, overrides, calls, constructs, reads or writes. is_guarded: the code works without it.
    by: the class and method that override.
    """

    name: str
    member: str
    how: str
    file: str
    line: int
    is_guarded: bool = False
    call: Call | None = None
    by: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.member

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Uses:
    """All uses. alternatives: for an imported name the names that are tried instead."""

    every: list[Use] = field(default_factory=list)
    alternatives: dict[str, frozenset[str]] = field(default_factory=dict)
    classes: list[Class] = field(default_factory=list)
    """Classes of this package that derive from one of vLLM."""

    def by_key(self) -> dict[tuple[str, str], list[Use]]:
        found: dict[tuple[str, str], list[Use]] = {}
        for use in self.every:
            found.setdefault(use.key, []).append(use)
        return found


def our_sources(root: Path = ROOT) -> SourceTree:
    """This package and its tools as they are in the repository."""
    rooms = {f"{OURS}.{room}": root / room for room in ("ops", "graphs")}
    return SourceTree({OURS: root / OURS, TOOLS: root / "tools" / TOOLS, **rooms})


def find_uses(ours: SourceTree, vllm: SourceTree) -> Uses:
    """Reads all code of this package, with vLLM's types from one version's sources."""
    tree = ours.joined(vllm)
    quiet = Inference(tree)
    uses = Uses()
    for name, file in chain(tree.files(OURS), tree.files(TOOLS)):
        module = tree.module(name)
        if module is not None and _concerns(file):
            _read(module, quiet, shown(file), uses)
    called = {(use.key, use.place) for use in uses.every if use.how == "calls"}
    every = {use for use in uses.every if use.how != "reads" or (use.key, use.place) not in called}
    uses.every = sorted(every, key=lambda use: (use.key, use.file, use.line, use.how, use.by))
    return uses


def _concerns(file: Path) -> bool:
    """Returns whether a file can use vLLM at all; others are not read."""
    return "vllm" in file.read_text(encoding="utf-8")


def shown(file: Path) -> str:
    """A file as people look for it, from the top of the repository."""
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def _read(module: Module, quiet: Inference, where: str, uses: Uses) -> None:
    tree = quiet.tree
    guards = Guards(module)

    def found(what: Member | Place | Class, node: ast.expr, is_written: bool) -> None:
        use = _use(tree, what, node, is_written, where, guards)
        if use is not None:
            uses.every.append(use)

    uses.every += _imports(tree, module, where, guards)
    for name, others in guards.others().items():
        uses.alternatives[name] = uses.alternatives.get(name, frozenset()) | others
    Reading(module, quiet, found).run()
    for node in module.definitions.values():
        class_ = class_at(tree, f"{module.name}.{node.name}") if isinstance(node, ast.ClassDef) else None
        if class_ is not None and class_.node is node and any(_is_vllm(one.name) for one in class_.family):
            uses.classes.append(class_)
            uses.every += _derived(class_, where)


def _is_vllm(name: str) -> bool:
    return name.partition(".")[0] == VLLM


def _imports(tree: SourceTree, module: Module, where: str, guards: Guards) -> Iterator[Use]:
    for node in guards.imports:
        pairs = imported_names(module, node)
        if isinstance(node, ast.Import):
            pairs = iter([(alias.name, alias.name) for alias in node.names])
        for _, target in pairs:
            name = _through_ours(tree, target)
            if _is_vllm(name):
                yield Use(name, "", "imports", where, node.lineno, guards.is_guarded(node, name.rpartition(".")[2]))


def _through_ours(tree: SourceTree, name: str) -> str:
    """Returns the origin of a name that this package re-exports."""
    for _ in range(9):
        owner, _, last = name.rpartition(".")
        module = tree.module(owner) if owner.partition(".")[0] in (OURS, TOOLS) else None
        if module is None or last not in module.imports or last in module.definitions:
            break
        name = tree.chosen(module.imports[last]) or name
    return name


def _use(
    tree: SourceTree, what: Member | Place | Class, node: ast.expr, is_written: bool, where: str, guards: Guards
) -> Use | None:
    """The use of a member, function or class of vLLM; None if it is one of this package's own."""
    is_call = isinstance(node, ast.Call) and last_name(node.func) not in (*_ASKS, "replace", "attrgetter")
    call = Call.of(node) if isinstance(node, ast.Call) and is_call else None
    if isinstance(what, Class):
        base = next((one for one in what.family if CONSTRUCTOR in one.own_members or one.is_data), None)
        if base is None or not _is_vllm(base.name) or base.name != what.name:
            return None
        return Use(what.name, CONSTRUCTOR, "constructs", where, node.lineno, call=call)
    if isinstance(what, Place):
        if not _is_vllm(what.name):
            return None
        guarded = guards.is_guarded(node, what.name.rpartition(".")[2])
        return Use(what.name, "", "calls" if is_call else "reads", where, node.lineno, guarded, call)
    if not _is_vllm(what.owner):
        return None
    how = "writes" if is_written else "calls" if is_call else "reads"
    return Use(what.owner, what.name, how, where, node.lineno, guards.is_guarded(node, what.name), call)


def _derived(class_: Class, where: str) -> Iterator[Use]:
    """Returns the bases of a class of this package, and the members that it overrides."""
    ours = [one for one in class_.family if not _is_vllm(one.name)]
    theirs = [one for one in class_.family if _is_vllm(one.name)]
    for base in class_.bases:
        if _is_vllm(base.name):
            yield Use(base.name, "", "derives", where, class_.node.lineno, by=class_.node.name)
    for one in ours:
        for name, member in one.own_members.items():
            hidden = next((other.own_members[name] for other in theirs if name in other.own_members), None)
            if hidden is None or one is not class_ or (name.startswith("__") and name != CONSTRUCTOR):
                continue
            is_method = member.kind in ("method", "property")
            if name != CONSTRUCTOR:
                how = "overrides" if is_method or member.maker is None else "writes"
                line = getattr(member.node, "lineno", class_.node.lineno)
                yield Use(hidden.owner, name, how, where, line, by=f"{class_.node.name}.{name}" if is_method else "")


class Guards:
    """Uses that a module's code can do without, by the ways in which code checks for a name."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._asked: set[str] = set()
        self._tried: dict[int, ast.AST] = {}
        self.imports: list[ast.Import | ast.ImportFrom] = []
        statements = []
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.append(node)
                # including those in functions
                module.bind_import(node)
            elif isinstance(node, (ast.Call, ast.Compare)):
                self._asked |= _asked_names(node)
            elif isinstance(node, (ast.Try, ast.If, ast.IfExp)):
                parts = _tried_parts(node)
                self._tried.update({id(inner): node for part in parts for inner in ast.walk(part)})
                if parts and not isinstance(node, ast.IfExp):
                    statements.append(node)
        self._others = self._alternatives(statements)
        self._chosen = {bound for bound, names in module.imports.items() if any(name in self._others for name in names)}

    def is_guarded(self, node: ast.AST, name: str) -> bool:
        """Returns whether the use of a name is tried only, or the name is asked for by text, or it belongs to a module
        of which there are two."""
        called = node.func if isinstance(node, ast.Call) else node
        owner = called.value if isinstance(called, ast.Attribute) else called
        of_chosen = isinstance(owner, ast.Name) and owner.id in self._chosen
        return of_chosen or id(node) in self._tried or name in self._asked

    def others(self) -> dict[str, frozenset[str]]:
        """Imported names of which a statement tries one or the other."""
        return self._others

    def _alternatives(self, statements: list[ast.Try | ast.If]) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for node in statements:
            second = node.handlers if isinstance(node, ast.Try) else node.orelse
            sides = [self._imported(node.body), self._imported(second)]
            for one, other in (sides, sides[::-1]):
                for bound, target in one:
                    same = {name for own, name in other if own == bound} or {name for _, name in other}
                    if same and _is_vllm(target):
                        found[target] = found.get(target, frozenset()) | same
        return found

    def _imported(self, body: Sequence[ast.AST]) -> list[tuple[str, str]]:
        nodes = (node for one in body for node in ast.walk(one) if isinstance(node, ast.ImportFrom))
        return [pair for node in nodes for pair in imported_names(self._module, node)]


def _tried_parts(node: ast.Try | ast.If | ast.IfExp) -> list[ast.AST]:
    """Returns the parts that run only if a name exists, or only if it does not."""
    if isinstance(node, ast.Try):
        tries = any(_catches_missing(one) for one in node.handlers)
        return [*node.body, *node.handlers, *node.orelse] if tries else []
    if not _asks(node.test):
        return []
    return [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is not None and last_name(one) in _NOT_THERE for one in types)


def _asks(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node.func) in _ASKS for node in ast.walk(test))


def _asked_names(node: ast.Call | ast.Compare) -> set[str]:
    """Names that are asked for by text: in `hasattr`, in `getattr` with a default, and with `in`."""
    texts: list[ast.expr] = []
    if isinstance(node, ast.Call) and len(node.args) > 1:
        name = last_name(node.func)
        texts = [node.args[1]] if name == "hasattr" or (name == "getattr" and len(node.args) == 3) else []
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        texts = [node.left]
    return {one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
