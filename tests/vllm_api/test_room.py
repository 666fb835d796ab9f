"""What each module of the room says of itself, and which of them our platform class may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_gaudi_ucm"
ROOM = ROOT / PACKAGE / "vllm_api"
MODULES = sorted(file.stem for file in ROOM.glob("*.py") if file.stem != "__init__")
KINDS = ("Public", "Extension point", "Internal")


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOM / f"{module}.py").read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> dict[str, str]:
    """Public function to docstring."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {node.name: ast.get_docstring(node) or "" for node in found}


def of_vllm(tree: ast.Module) -> set[str]:
    """Names that a module takes from vLLM at module level."""
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")]
    return {alias.name for node in found for alias in node.names}


def listed(tree: ast.Module) -> set[str]:
    """`__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_there_are_functions() -> None:
    assert sum(len(functions(tree_of(module))) for module in MODULES) >= 20


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in functions(tree_of(module))]
)
def test_a_function_has_a_reason_and_a_condition_for_its_removal(module: str, name: str) -> None:
    text = functions(tree_of(module))[name]
    assert text.count("\nReason: ") == text.count("\nRemove when: ") == 1


@pytest.mark.parametrize("module", MODULES)
def test_a_re_export_is_said_to_be_public_or_internal(module: str) -> None:
    """Each name of vLLM that the module lists is named under one of `KINDS`."""
    tree = tree_of(module)
    names = listed(tree) & of_vllm(tree)
    paragraphs = (ast.get_docstring(tree) or "").split("\n\n", 1)[-1]
    assert {name for name in names if f"`{name}`" not in paragraphs} == set()
    assert not names or any(f"{kind}:" in paragraphs or f"{kind}, experimental:" in paragraphs for kind in KINDS)


def test_the_room_lists_its_modules() -> None:
    text = (ROOM / "__init__.py").read_text(encoding="utf-8")
    assert {module for module in MODULES if f"`{module}`" not in text} == set()


def at_import(file: Path) -> Iterator[str]:
    """Full names that a module imports when it is imported; types and functions' imports are none."""
    pending: list[ast.stmt] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            pending += node.body + node.orelse
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            pending += node.body


def file_of(module: str) -> Path | None:
    """The file of one of our modules or packages."""
    parts = module.split(".")
    if parts[1:2] and parts[1] in ("ops", "graphs"):
        parts = parts[1:]
    base = ROOT.joinpath(*parts)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def loaded_with(module: str) -> dict[str, set[str]]:
    """Our modules that importing `module` imports, each with the names that it takes from vLLM."""
    found: dict[str, set[str]] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        file = file_of(name)
        if name in found or file is None:
            continue
        found[name] = {imported for imported in at_import(file) if imported.startswith("vllm.")}
        for imported in at_import(file):
            if imported.partition(".")[0] == PACKAGE:
                parts = imported.split(".")
                pending += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return found


WITHOUT_A_PLATFORM = ("vllm.platforms.",)
"""Modules of vLLM that do not ask for the platform when they are imported."""


def test_the_platform_class_loads_while_vllm_is_half_imported() -> None:
    """Most of vLLM asks for `current_platform`, which loads our class: what that imports must not ask again."""
    loaded = loaded_with(f"{PACKAGE}.platform.platform")
    assert len(loaded) > 50
    too_much = {
        module: names
        for module, found in loaded.items()
        if (names := {name for name in found if not name.startswith(WITHOUT_A_PLATFORM)})
    }
    assert not too_much, "import it in the functions that need it"


def test_the_entry_point_imports_nothing_of_vllm() -> None:
    """`register()` runs in every process of vLLM."""
    for module in (f"{PACKAGE}.device.detect", f"{PACKAGE}.vllm_api.engine_process"):
        assert not [name for names in loaded_with(module).values() for name in names]


@pytest.mark.slow  # interpreters that import torch
@pytest.mark.parametrize("first", ["vllm.distributed", "vllm.v1.kv_cache_interface", "vllm.utils.torch_utils"])
def test_whichever_part_of_vllm_is_imported_first(first: str) -> None:
    """Each of these asks for the platform."""
    code = f"import {first}; from vllm.platforms import current_platform as found; print(type(found).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["UcmPlatform"], done.stderr
