"""Calls of functions that dynamo is told to leave alone (`torch.compiler.disable`), made from compiled functions.

The bridge is recorded to drop such a call where nothing consumes its result. Source: vllm-gaudi, models/qwen3_5.py.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.extent import is_in_compiled_call

import torch

_disable = torch._dynamo.disable


def watch_disabled() -> None:
    """From now on functions that are disabled look at who calls them."""
    torch._dynamo.disable = _watching  # type: ignore[assignment]


def _watching(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    if fn is None:
        return functools.partial(_watching, recursive=recursive, **options)
    is_function = callable(fn) and not isinstance(fn, type | torch.nn.Module)
    is_own = str(getattr(fn, "__module__", "torch")).partition(".")[0] in ("torch", "habana_frameworks")
    if not is_function or not recursive or is_own:
        return _disable(fn, recursive, **options)
    return _disable(_watched(fn), recursive, **options)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # below dynamo's own wrapper
        if is_in_compiled_call(caller) and _discards(caller):
            name = getattr(function, "__qualname__", type(function).__name__)
            finding = "a disabled function is called in a compiled one, and nothing uses its result"
            if duties.spoils(15, name, finding, "return a tensor from it, and compute with that"):
                return None
        return function(*args, **kwargs)

    return call


def _discards(frame: FrameType) -> bool:
    """Whether the statement that a frame is in calls something and uses nothing of what it returns."""
    tree = _parse(frame.f_code.co_filename)
    if tree is None:
        return False
    line = frame.f_lineno
    scopes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not scopes:
        return False
    scope = max(scopes, key=lambda node: node.lineno)
    for node in ast.walk(scope):
        if isinstance(node, ast.Expr | ast.Assign) and node.lineno <= line <= (node.end_lineno or 0):
            return _is_unused(node, scope)
    return False


def _is_unused(statement: ast.Expr | ast.Assign, scope: ast.AST) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    target = statement.targets[0]
    if not isinstance(target, ast.Name):
        return False
    loads = (node for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return all(node.id != target.id for node in loads)


@functools.cache
def _parse(file: str) -> ast.Module | None:
    source = "".join(linecache.getlines(file))
    return ast.parse(source) if source else None
