"""Objects are wired by few arguments, and by name where there are many."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import ROOT, sources

MOST_ARGUMENTS = 8
MANY_ARGUMENTS = {
    "UnifiedAttentionImpl": "vLLM's signature of an attention implementation",
    "LatentAttentionBlock": "vLLM's signature of a wrapper of latent attention",
}
"""Classes with more, and why. Records have fields and no behaviour: what their generated constructors take is data."""

MOST_BY_POSITION = 6
MATHEMATICS = {"ops"}
"""Operations and kernels take tensors, in the order of their formulas."""
TOOLS = {"cli", "tools"}
"""No server runs these."""
BY_POSITION = {
    "graphs/cost/specs.py": "a table with a row for each device",
    "vllm_gaudi_ucm/scheduler/block_manager.py": "the arguments of vLLM's method, handed on",
    "vllm_gaudi_ucm/vllm_api/moe.py": "the arguments of vLLM's function, handed on",
}
"""Files with calls that have more arguments by position, and why."""


def constructors(source: str) -> Iterator[tuple[str, int]]:
    """Classes that define a constructor, and how many arguments it has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    arguments = one.args
                    yield node.name, len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1


def long_calls(source: str) -> list[str]:
    """Calls with many arguments by position. A message of a log has as many as it has places."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call.func)}"
        for call in calls
        if len(call.args) > MOST_BY_POSITION and not ast.unparse(call.func).startswith("logger.")
    ]


def test_what_counts() -> None:
    source = (
        "class A:\n    def __init__(self, a, *, b): pass\nf(1, 2, 3, 4, 5, 6, 7)\nlogger.info(1, 2, 3, 4, 5, 6, 7)\n"
    )
    assert list(constructors(source)) == [("A", 2)]
    assert long_calls(source) == ["line 3: f"]


def test_constructors_take_few_arguments() -> None:
    """What always travels together is an object of its own."""
    found = {
        name: count
        for _, file in sources()
        for name, count in constructors(file.read_text(encoding="utf-8"))
        if count > MOST_ARGUMENTS
    }
    assert set(found) == set(MANY_ARGUMENTS), found


def test_many_arguments_are_given_by_name() -> None:
    found = {
        str(file.relative_to(ROOT)): calls
        for room, file in sources()
        if room not in MATHEMATICS | TOOLS and (calls := long_calls(file.read_text(encoding="utf-8")))
    }
    assert set(found) == set(BY_POSITION), found
