"""Python packages as sources: modules, the bindings of their names, and where a name is defined."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign | ast.Module
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """A definition, and its module.

    name: its full name; a method's has its class before it.
    """

    name: str
    module: Module
    node: Definition


@dataclass(eq=False)
class Module:
    """One source file.

    imports: the full names of its imported names, at any depth of `if` and `try`; several for a name that is tried in
    several places.
    """

    name: str
    file: Path
    is_package: bool
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.file.read_text(encoding="utf-8"), str(self.file))

    def absolute(self, node: ast.ImportFrom) -> str:
        """The full name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    def bind(self, statements: list[ast.stmt]) -> None:
        """Reads the names that statements bind. A definition counts before an assignment of the same name."""
        for node in statements:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                self.definitions[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.definitions.setdefault(target.id, node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.bind_import(node)
            else:
                for part in ("body", "orelse", "finalbody"):
                    self.bind(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    self.bind(handler.body)

    def bind_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for bound, target in imported_names(self, node):
            if bound == "*":
                self.stars.append(target)
            elif target not in self.imports.setdefault(bound, []):
                self.imports[bound].append(target)


def imported_names(module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Returns the full name for each name that an import binds; for a star, the module."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif alias.name == "*":
            yield "*", module.absolute(node)
        else:
            yield alias.asname or alias.name, f"{module.absolute(node)}.{alias.name}"


class SourceTree:
    """Packages by name, each in a folder.

    folders: package (also `package.room`, for a folder that is installed inside another package) to folder.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self._modules: dict[str, Module | None] = {}

    def joined(self, other: SourceTree) -> SourceTree:
        """Both trees as one; the modules that were read are read again."""
        return SourceTree({**self.folders, **other.folders})

    def owns(self, name: str) -> bool:
        """Returns whether a full name belongs to one of the packages."""
        return name.partition(".")[0] in self.folders

    def files(self, package: str) -> Iterator[tuple[str, Path]]:
        """Every module of a package: its name and file."""
        for name, folder in self.folders.items():
            if name != package and not name.startswith(package + "."):
                continue
            for file in sorted(folder.rglob("*.py")):
                parts = file.relative_to(folder).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                module = ".".join((name, *parts))
                # a folder may be a part of the package
                if self._file(module) == file:
                    yield module, file

    def module(self, name: str) -> Module | None:
        """The module of this full name; None if there is none."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        file = self._file(name)
        if file is None:
            return None
        module = Module(name, file, file.name == "__init__.py")
        module.bind(module.tree.body)
        return module

    def _file(self, name: str) -> Path | None:
        package = max((own for own in self.folders if f"{name}.".startswith(f"{own}.")), key=len, default=None)
        if package is None:
            return None
        path = self.folders[package].joinpath(*filter(None, name[len(package) :].split(".")))
        found = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        return next((file for file in found if file.is_file()), None)

    def find(self, name: str) -> Place | None:
        """Finds where a full name is defined, through imports of other modules; None if it does not exist."""
        return self._find(name, frozenset())

    def _find(self, name: str, seen: frozenset[str]) -> Place | None:
        if name in seen or not self.owns(name):
            return None
        module = self.module(name)
        if module is not None:
            return Place(name, module, module.tree)
        owner, _, last = name.rpartition(".")
        if not owner:
            return None
        module = self.module(owner)
        if module is not None:
            return self._bound(module, last, seen | {name})
        place = self._find(owner, seen | {name})
        if place is None or place.name == owner:
            return None
        return self._find(f"{place.name}.{last}", seen | {name})

    def _bound(self, module: Module, name: str, seen: frozenset[str]) -> Place | None:
        node = module.definitions.get(name)
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) or (node is not None and name not in module.imports):
            return Place(f"{module.name}.{name}", module, node)
        for target in module.imports.get(name, ()):
            if (place := self._find(target, seen)) is not None:
                return place
        return next((place for star in module.stars if (place := self._find(f"{star}.{name}", seen))), None)

    def chosen(self, targets: list[str]) -> str | None:
        """The first of several names that is there; the first if none is, and None if there are none."""
        if len(targets) < 2:
            return targets[0] if targets else None
        return next((name for name in targets if self.find(name) is not None), targets[0])

    def elsewhere(self, package: str, name: str) -> list[str]:
        """Full names of the classes, functions and variables called `name` at the top of a package's modules."""
        pattern = re.compile(rf"^(?:class |def |async def ){name}\b|^{name}\s*[:=]", re.MULTILINE)
        files = self.files(package)
        return [f"{module}.{name}" for module, file in files if pattern.search(file.read_text(encoding="utf-8"))]
