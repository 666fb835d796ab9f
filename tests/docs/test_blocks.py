"""Blocks of the documentation that are not commands: what they name exists, and they are what they say they are."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.commands import ROOT, pages
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS

BLOCK = re.compile(r"^```(python|json|yaml|toml)\n(.*?)^```", re.S | re.M)
READ: dict[str, Callable[[str], Any]] = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}


def found(*languages: str) -> list[Any]:
    """Blocks of these languages, as parameters of a test."""
    parameters = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                parameters.append(pytest.param(match[1], match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return parameters


@pytest.mark.parametrize(("language", "text"), found("json", "yaml", "toml"))
def test_data_can_be_read(language: str, text: str) -> None:
    # several objects, one a line: a part of a phase log
    documents = text.splitlines() if language == "json" and text.count("\n{") else [text]
    assert all(READ[language](document) for document in documents)


@pytest.mark.parametrize(("language", "text"), found("python"))
def test_what_python_imports_exists(language: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_gaudi_ucm"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_method_of_the_sparse_page_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "inside" / "sparse.md").read_text(encoding="utf-8")
    (code,) = (match[2] for match in BLOCK.finditer(page) if match[1] == "python")
    (section,) = (match[2] for match in BLOCK.finditer(page) if match[1] == "json")
    (tmp_path / "best_heads.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    best_heads = importlib.import_module("best_heads")
    options = json.loads(section)["ucm"]["ucm_sparse_config"]["BestHeads"]
    method = best_heads.BestHeads(UcmSparseRole.WORKER, options)
    assert method.options.heads == 4
    assert "BestHeads" not in SPARSE_METHODS.names()
