"""A pytest plugin: Triton's interpreter without looking for what to replace at every call of every function.

It lists the members of `triton.language` anew for each launch, and for each function that a kernel calls, where all of
them are replaced already: a quarter of its time. `TRITON_INTERPRET=1 python -m pytest -p tests.ops.quick_interpreter`
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _patch_attr = interpreter._patch_lang, interpreter._patch_attr
_builtins: dict[Any, list[tuple[str, Any]]] = {
    part: [(name, member) for name, member in inspect.getmembers(part) if tl.core.is_builtin(member)]
    for part in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
}


def _patch_builtin(part: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins[part]:
        _patch_attr(part, name, member, builder, scope)


def _patch_lang_once(function: Any) -> Any:
    """Nothing within a launch, whose replacements last until it ends."""
    found = [module for module in function.__globals__.values() if module is tl or module is tl.core]
    if found and not any(tl.core.is_builtin(module.load) for module in found):
        return interpreter._LangPatchScope()
    return _patch_lang(function)


interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang_once
