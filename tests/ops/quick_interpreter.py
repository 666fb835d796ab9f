"""A pytest plugin: Triton's interpreter without what it computes over and over, in half of its time.

`TRITON_INTERPRET=1 python -m pytest -p tests.ops.quick_interpreter`. Kernels compute what they do without it:

- members of `triton.language` that a launch replaces are listed once, and not for each function that a kernel calls,
  and called without the check that wraps them;
- the check of integers for overflow is left out: without `debug` the interpreter computes and then ignores it;
- types of values, of which there are few, are derived once for each of their shapes;
- operands of one plain type are not promoted, and a number is made a constant once.

Cases that others cover are left out (`LEFT_OUT`); a GPU runs them.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_core: Any = tl.core
_patch_lang = interpreter._patch_lang


def _interpreted(member: Any) -> Any:
    """A member as a launch calls it; what wraps it would only ask for the argument that is given here."""
    function = vars(member).get("__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


_builtins: dict[Any, list[tuple[str, Any]]] = {
    part: [(name, _interpreted(member)) for name, member in inspect.getmembers(part) if _core.is_builtin(member)]
    for part in (tl, _core, tl.tensor, tl.math, _core.tensor_descriptor_base)
}
_languages: dict[Any, list[Any]] = {}


def _patch_builtin(part: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins[part]:
        scope.set_attr(part, name, member)


def _patch_lang_once(function: Any) -> Any:
    """Nothing within a launch, whose replacements last until it ends."""
    if function not in _languages:
        _languages[function] = [part for part in function.__globals__.values() if part is tl or part is _core]
    found = _languages[function]
    if found and not any(_core.is_builtin(module.load) for module in found):
        return interpreter._LangPatchScope()
    return _patch_lang(function)


_init_block, _init_tensor = _core.block_type.__init__, _core.tensor.__init__
_find_numpy_type = interpreter._get_np_dtype
_unwrap, _broadcast, _is_equal = _core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value, _core.dtype.__eq__
_PLAIN = frozenset({int, float, bool, str, type(None), _core.dtype, _core.block_type, _core.pointer_type, _core.tensor})
_blocks: dict[Any, dict[str, Any]] = {}
_tensors: dict[Any, dict[str, Any]] = {}
_numpy_types: dict[str, Any] = {}


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *map(_unwrap_quickly, shape))
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
    vars(self).update(_blocks[key])
    self.element_ty = element_ty


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    key = tuple(type.shape) if type.is_block() else ()
    if key not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[key] = {"shape": self.shape, "numel": self.numel}
    vars(self).update(_tensors[key])
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _numpy_type(tt_dtype: Any) -> Any:
    scalar = tt_dtype.scalar
    found = _numpy_types.get(scalar.name)
    if found is None:
        found = _numpy_types[scalar.name] = _find_numpy_type(scalar)
    return found


def _unwrap_quickly(value: Any) -> Any:
    return value if type(value) in _PLAIN else _unwrap(value)


def _broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
    """Values of the same shape stay as they are."""
    is_block = lhs.type.is_block()
    if is_block == rhs.type.is_block() and (not is_block or lhs.type.shape.values == rhs.type.shape.values):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


_check_operands = TritonSemantic.binary_op_type_checking_impl
# Triton up to 3.6 casts within the check
_cast_operand: Any = getattr(TritonSemantic, "_cast_to_computation_type", None)
_PROMOTED_TO_ITSELF = frozenset({"int1", "int32", "int64", "fp32"})
_constants: dict[Any, Any] = {}


def _check_same(self: Any, lhs: Any, rhs: Any, *allowed: Any, **asked: Any) -> Any:
    """Operands of one type are computed in it."""
    if type(lhs) is type(rhs) is _core.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in _PROMOTED_TO_ITSELF:
        return self.broadcast_impl_value(lhs, rhs)
    return _check_operands(self, lhs, rhs, *allowed, **asked)


def _cast_once(self: Any, value: Any, dtype: Any) -> Any:
    """A number is the same constant each time."""
    if type(value) is _core.tensor:
        return value if value.dtype is dtype else _cast_operand(self, value, dtype)
    key = type(value), value or repr(value), dtype.name
    if key not in _constants:
        _constants[key] = _cast_operand(self, value, dtype)
    return _constants[key]


_INTEGERS = frozenset(_core.dtype.SINT_TYPES + _core.dtype.UINT_TYPES)


def _is_int(self: Any) -> bool:
    return self.name in _INTEGERS


def _is_equal_type(self: Any, other: Any) -> bool:
    return self is other or _is_equal(self, other)


_options = interpreter.interpreter_builder.options
assert not _options.debug, "else an overflow is an error"
_ALL: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_patch_builtin", _patch_builtin),
    (interpreter, "_patch_lang", _patch_lang_once),
    (interpreter, "_get_np_dtype", _numpy_type),
    (interpreter.interpreter_builder, "options", dataclasses.replace(_options, sanitize_overflow=False)),
    (TritonSemantic, "broadcast_impl_value", _broadcast_unequal),
    (TritonSemantic, "binary_op_type_checking_impl", _check_same),
    (TritonSemantic, "_cast_to_computation_type", _cast_once),
    (_core.dtype, "is_int", _is_int),
    (_core, "_unwrap_if_constexpr", _unwrap_quickly),
    (_core.block_type, "__init__", _make_block),
    (_core.tensor, "__init__", _make_tensor),
    (_core.dtype, "__eq__", _is_equal_type),
)
_QUICK = tuple(quick for quick in _ALL if quick[1] != "_cast_to_computation_type" or _cast_operand is not None)
REPLACED = tuple((owner, name, getattr(owner, name)) for owner, name, _ in _QUICK)
"""What was there before, with its place."""

for _owner, _name, _quick in _QUICK:
    setattr(_owner, _name, _quick)

_FEATURES = "Features(window={}, chunked=False, cap=0.0, sinks={}, slopes=False)"
_WINDOW = f"ops/test_cuda_windows.py::test_verifications[{_FEATURES}-False]"
LEFT_OUT = frozenset(
    {
        # of what runs at the same time: here programs run one by one
        "ops/test_cuda_attention.py::test_garbage_beside_many_heads_is_left_out_each_time",
        "ops/test_cuda_attention.py::test_repeats_are_equal_to_the_last_bit",
        # between numbers of programs that stay
        "ops/test_cuda_attention.py::test_any_number_of_programs_is_the_same[11-True]",
        "ops/test_cuda_attention.py::test_programs_share_halves_of_blocks[requests0-7]",
        "ops/test_cuda_attention.py::test_programs_share_halves_of_blocks[requests1-7]",
        # keys and values, NaN and Inf are all among those that stay
        "ops/test_cuda_attention.py::test_a_bad_token_breaks_the_rows_that_see_it[5-key-nan]",
        "ops/test_cuda_attention.py::test_a_bad_token_breaks_the_rows_that_see_it[5-value-inf]",
        # other tests of the file are in float32
        "ops/test_cuda_latent.py::test_the_kernels_themselves_compute_every_part[dtype0]",
        # in tiles: a window of 3, one of 33 with sinks, and chunks stay; in one launch all do
        _WINDOW.format(16, True),
        _WINDOW.format(13, False),
        _WINDOW.format(200, True),
        # each value of either parameter stays
        "ops/test_cuda_narrow_caches.py::test_cuda_and_others_read_narrow_latents[True-dtype0-cuda]",
        "ops/test_cuda_narrow_caches.py::test_cuda_and_others_read_narrow_latents[False-dtype1-cuda]",
        "ops/test_cuda_narrow_caches.py::test_cuda_and_others_read_narrow_caches[True-dtype0-cuda]",
        "ops/test_cuda_narrow_caches.py::test_cuda_and_others_read_narrow_caches[False-dtype1-cuda]",
        "ops/test_cuda_own_blocks.py::test_own_blocks_beside_chosen_ones_are_one_list[True-of the plan]",
        "ops/test_cuda_own_blocks.py::test_own_blocks_beside_chosen_ones_are_one_list[False-of a layer]",
    }
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.nodeid.removeprefix("tests/") in LEFT_OUT]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
