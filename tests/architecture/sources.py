"""The modules of the package, and what each imports, read from their text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts import changed_tests

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_gaudi_ucm"
FOLDERS = {PACKAGE: PACKAGE, "ops": f"{PACKAGE}.ops", "graphs": f"{PACKAGE}.graphs"}
TOOLS = "vllm_gaudi_ucm_tools"
"""The second package, one room. It may import every other one."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of both packages, as (room, file)."""
    for folder in (*FOLDERS, f"tools/{TOOLS}"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield room_of(module_of(file)), file


def module_of(file: Path) -> str:
    """Full name of the module in this file."""
    name = changed_tests.module_of(file.relative_to(ROOT).as_posix())
    assert name is not None, file
    return name


def room_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] == TOOLS:
        return "tools"
    return parts[1] if len(parts) > 1 else "root"


@cache
def imported(file: Path, *, types: bool = True, functions: bool = True) -> frozenset[str]:
    """Full names of modules; `from package import name` counts as `package.name`, which may be a module.

    types: whether imports for type checking count. functions: whether those in functions do.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    hidden: set[int] = set()
    for node in ast.walk(tree):
        checks_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if (checks_types and not types) or (isinstance(node, ast.FunctionDef) and not functions):
            hidden |= {id(inner) for inner in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)
