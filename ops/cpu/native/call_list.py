"""Recorded calls of native kernels, replayed without Python (source/replay.cpp)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, c_float, c_int64
from typing import Any, NamedTuple

from vllm_gaudi_ucm.ops.cpu.native.library import argument_types, native


class Kernel(NamedTuple):
    """number: as in source/replay.cpp. done: its return value on success; 0 if it returns nothing."""

    number: int
    done: int


KERNELS = {
    "ucm_rms_norm": Kernel(0, 0),
    "ucm_rotary": Kernel(1, -1),
    "ucm_silu_and_mul": Kernel(2, 0),
    "ucm_write_kv": Kernel(3, -1),
    "ucm_linear": Kernel(4, 0),
    "ucm_compact_linear": Kernel(5, 0),
    "ucm_tile_linear": Kernel(6, 0),
    "ucm_attend": Kernel(7, 0),
    "ucm_select_blocks": Kernel(8, 0),
    "ucm_rms_norm_half": Kernel(9, 0),
    "ucm_rotary_half": Kernel(10, -1),
    "ucm_silu_and_mul_half": Kernel(11, 0),
    "ucm_widen_rows": Kernel(12, 0),
    "ucm_narrow_rows": Kernel(13, 0),
    "ucm_bf16_linear": Kernel(14, 0),
    "ucm_int8_linear": Kernel(15, 0),
    "ucm_bf16_tile_linear": Kernel(16, 0),
}
_MOST_ARGUMENTS = 13


class Call(Structure):
    """`Call` of source/replay.cpp: a kernel, its return value on success, and its arguments, 64 bits each."""

    _fields_ = (("kernel", c_int64), ("done", c_int64), ("arguments", c_int64 * _MOST_ARGUMENTS))


class CallList:
    """Calls that run one after the other.

    calls: in order. kept: objects that their addresses point into, except tensors, which the caller keeps.
    """

    def __init__(self, calls: Sequence[Call], kept: Sequence[object] = ()) -> None:
        self._calls = (Call * len(calls))(*calls)
        self._kept = tuple(kept)

    def __len__(self) -> int:
        return len(self._calls)

    def run_calls(self) -> bool:
        """Runs the calls; False if one did not succeed, in which case the calls after it did not run.

        A call fails if it finds something that its caller has to handle: a bad index, a result that is not finite.
        """
        library = native()
        assert library is not None, "recorded from kernels that do not exist"
        return bool(library.ucm_replay(ctypes.byref(self._calls), len(self._calls)) < 0)


def record_call(name: str, arguments: Sequence[Any], stand_ins: Mapping[int, Structure]) -> tuple[Call, list[object]]:
    """Records the call just made to a kernel of `KERNELS`. Returns the record and the objects that must live as long.

    Structures are copied as they are now, because callers reuse them. A structure whose id is in `stand_ins` is
    replaced by the one given there, whose contents may change from run to run.
    """
    words = (c_int64 * _MOST_ARGUMENTS)()
    kept: list[object] = []
    for index, (argument, kind) in enumerate(zip(arguments, argument_types(name), strict=True)):
        words[index] = _word(argument, kind, stand_ins, kept)
    return Call(*KERNELS[name], words), kept


def _word(argument: Any, kind: type, stand_ins: Mapping[int, Structure], kept: list[object]) -> int:
    if argument is None:
        return 0
    if kind is c_float:
        return int.from_bytes(struct.pack("<f", argument), "little")
    if isinstance(argument, int):
        return argument
    if isinstance(argument, Array):
        kept.append(argument)
        return ctypes.addressof(argument)
    # the result of ctypes.byref
    structure = argument._obj
    passed = stand_ins.get(id(structure))
    if passed is None:
        passed = type(structure).from_buffer_copy(structure)
    kept.append(passed)
    return ctypes.addressof(passed)
