"""Docstrings, comments and messages of the code are sentences, in the words of docs/reference/glossary.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_gaudi_ucm"
# Folders whose prose has not been brought to these words yet.
NOT_YET: tuple[str, ...] = ()
# kv_groups.py: refusals whose words tests of the engine expect
FILES_NOT_YET: tuple[str, ...] = ()
ROOMS = sorted(
    folder
    for folder in (
        *(room for room in PACKAGE.iterdir() if (room / "__init__.py").exists() and room.name not in NOT_YET),
        *(ROOT / name for name in ("ops", "graphs", "tools", "benchmarks", "scripts", "examples")),
    )
)
# a word that is not used -> the word to use
INSTEAD = {
    r"beside(?!:)": "with, alongside, compared with, in addition to",
    r"nobody|whoever": "no caller, no request",
    r"nothing that|no part of": "a negated verb",
    r"such a one|that which|so many that": "a shorter sentence",
}
# a beginning -> what to begin with
FRAGMENTS = r"(?:Of|As|What|Whether|Those|That|Who|Told)\b"
AT_A_SENTENCE = r"(?:Those|That) of\b"
CODE = re.compile(r"``.*?``|`[^`\n]*`", re.S)
ANY = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b|\b{AT_A_SENTENCE}", re.I)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, also of strings below an assignment."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, here in zip([None, *node.body], node.body, strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            text = here.value if documents and isinstance(here, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield here.lineno, text.value


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string of several words, docstrings among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(source: str) -> Iterator[str]:
    """Each as `LINE: "what was found": what to write`."""
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        if match := re.match(rf"\s*{FRAGMENTS}", text):
            yield f'{line}: a docstring begins with "{match[0].strip()}": begin with what it does'
    if not ANY.search(source):
        return
    for line, text in (*strings(tree), *comments(source)):
        prose = CODE.sub(" ", text)
        for word, better in INSTEAD.items():
            for match in re.finditer(rf"\b(?:{word})(?!\w)", prose, re.I):
                yield f'{line}: "{match[0]}": {better}'
        for match in re.finditer(rf"(?:^\W*|[.:;]\s+){AT_A_SENTENCE}", prose):
            yield f'{line}: "{match[0].strip()}": the noun itself'


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_prose(room: Path) -> None:
    found = [
        f"{name}:{fault}"
        for file in sorted(room.rglob("*.py"))
        if not (name := file.relative_to(ROOT).as_posix()).startswith(FILES_NOT_YET)
        for fault in faults(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Of one process."""',
        'def run() -> bool:\n    """Whether it runs."""',
        "x = 1\n# the copy beside the step\n",
        'raise ValueError("nobody is there to ask")',
        "x = 1  # sizes. Those of the step come first\n",
    ],
)
def test_a_fault_is_found(source: str) -> None:
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    ['"""Returns `nobody`, as its caller does."""', 'x = 1\n"""A value, besides others."""', "beside = 1  # of two\n"],
)
def test_good_prose_passes(source: str) -> None:
    assert list(faults(source)) == []
