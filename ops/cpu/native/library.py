"""The kernels as functions of this process: loaded once, or missing for a known reason."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch  # torch's OpenMP must be in the process before the library asks for its symbols
from torch import Tensor

from vllm_gaudi_ucm.envs import BUILD_KERNELS, kernel_choice
from vllm_gaudi_ucm.ops.cpu.native import levels
from vllm_gaudi_ucm.ops.cpu.native.build import KEEP, BuildError, CacheError, build, cpu_features

logger = logging.getLogger(__name__)

_INT, _POINTER, _FLOAT = c_int64, c_void_p, c_float
# Result and arguments of every function, as source/*.cpp declare them.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ucm_rms_norm": (None, (_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _FLOAT)),
    "ucm_rotary": (
        _INT,
        (_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT),
    ),
    "ucm_rms_norm_half": (None, (_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT)),
    "ucm_rotary_half": (
        _INT,
        (_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, *[_INT] * 4),
    ),
    "ucm_silu_and_mul_half": (None, (_POINTER, _INT, _POINTER, _INT, _INT, _INT)),
    "ucm_silu_and_mul": (None, (_POINTER, _INT, _POINTER, _INT, _INT)),
    "ucm_widen_rows": (None, (_POINTER, _INT, _POINTER, _INT, _INT, _INT)),
    "ucm_narrow_rows": (None, (_POINTER, _POINTER, _INT, _INT, _INT, _INT)),
    "ucm_write_kv": (_INT, (*[_POINTER] * 5, *[_INT] * 5, POINTER(_INT))),
    "ucm_swap_blocks": (_INT, (POINTER(_INT), POINTER(_INT), _INT, _POINTER, *[_INT] * 6)),
    "ucm_linear": (None, (_POINTER, _INT, _POINTER, _POINTER, _POINTER, *[_INT] * 4)),
    "ucm_bf16_linear": (None, (_POINTER, _INT, *[_POINTER] * 3, *[_INT] * 4)),
    "ucm_bf16_tile_linear": (None, (_POINTER, _INT, *[_POINTER] * 3, *[_INT] * 4)),
    "ucm_multiplies_bf16": (_INT, ()),
    "ucm_int8_linear": (None, (_POINTER, _INT, _POINTER, _INT, *[_POINTER] * 5, *[_INT] * 3)),
    "ucm_multiplies_int8": (_INT, ()),
    "ucm_compact_linear": (None, (_POINTER, _INT, _INT, *[_POINTER] * 5, *[_INT] * 4)),
    "ucm_tile_linear": (None, (_POINTER, _INT, _INT, *[_POINTER] * 5, *[_INT] * 4)),
    "ucm_lanes": (_INT, ()),
    "ucm_matrix_tiles": (_INT, ()),
    "ucm_use_matrix_tiles": (None, (_INT,)),
    "ucm_uses_matrix_tiles": (_INT, ()),
    "ucm_attend": (_INT, (_POINTER, _POINTER, _POINTER)),
    "ucm_block_scores": (_INT, (_POINTER,)),
    "ucm_choose_blocks": (_INT, (_POINTER,)),
    "ucm_select_blocks": (_INT, (_POINTER,)),
    "ucm_replay": (_INT, (_POINTER, _INT)),
}


@dataclass(frozen=True)
class _Outcome:
    """The loaded library, or None and the reason."""

    library: ctypes.CDLL | None
    reason: str
    not_kept: str = ""
    """Why the library was built for this process alone."""
    origin: str = ""
    """The compiler's origin, and the CPUs that it compiled for."""


_lock = threading.Lock()
_outcome: _Outcome | None = None
# Per thread: the stand-in for the library while its kernel calls are recorded.
_stand_ins: dict[int, object] = {}


def native() -> ctypes.CDLL | None:
    """Returns the kernels; None if they cannot be built or loaded. If no wheel contains them, the first call may take
    some seconds to build them. Raises ValueError if a variable asks for kernels that do not exist.
    """
    global _outcome
    if _outcome is None:
        with _lock:
            if _outcome is None:
                _outcome = _load()
    if _stand_ins and (stand_in := _stand_ins.get(threading.get_ident())) is not None:
        return cast("ctypes.CDLL", stand_in)
    return _outcome.library


@contextmanager
def standing_in(stand_in: object) -> Iterator[None]:
    """Makes `native()` return `stand_in` in this thread, to record kernel calls."""
    thread = threading.get_ident()
    _stand_ins[thread] = stand_in
    try:
        yield
    finally:
        del _stand_ins[thread]


def argument_types(name: str) -> tuple[type, ...]:
    """The C types of a kernel's arguments."""
    return _SIGNATURES[name][1]


def why_not_native() -> str:
    """Returns why `native()` is None, in words for a log; empty if it is not None."""
    native()
    assert _outcome is not None
    return _outcome.reason


def why_not_kept() -> str:
    """Returns why each process builds the kernels again, in words for a log; empty if a folder keeps them."""
    native()
    assert _outcome is not None
    return _outcome.not_kept


def origin() -> str:
    """Returns who compiled the kernels, and for which CPUs, in words; empty if there are none."""
    native()
    assert _outcome is not None
    return _outcome.origin


def identity() -> str:
    """A name that differs if source, compiler or CPU of the kernels differ. Raises OSError if their file is gone."""
    library = native()
    assert library is not None, "there are none"
    path = Path(library._name)
    if path.parent != levels.PORTABLE:
        return path.stem.removeprefix("kernels-")
    # the same file serves different CPUs, which may share a cache
    return hashlib.sha256(path.read_bytes() + cpu_features().encode()).hexdigest()[:20]


def _load() -> _Outcome:
    built_here = kernel_choice() == BUILD_KERNELS
    found = (None if built_here else _open_portable()) or _open_built()
    if found.library is not None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found.library, name)
            function.restype, function.argtypes = result, arguments
    return found


def _open_portable() -> _Outcome | None:
    """The wheel's library for this CPU; None if the wheel has none that this process can load."""
    found = levels.find_level()
    if found is None:
        return None
    level, path = found
    try:
        return _Outcome(ctypes.CDLL(str(path)), "", origin=f"from the wheel, for {level.name} CPUs")
    except OSError as error:
        logger.warning("The native CPU kernels of the wheel cannot be loaded, so they are built here: %s", error)
        return None


def _open_built() -> _Outcome:
    try:
        library, not_kept = _open_library()
    except (BuildError, OSError) as error:
        return _Outcome(None, str(error))
    return _Outcome(library, "", not_kept, "built here, for this CPU")


def _open_library() -> tuple[ctypes.CDLL, str]:
    """Opens the library from the user's cache or, if that cannot be used, from a temporary folder, and says why."""
    try:
        return ctypes.CDLL(str(build())), ""
    except CacheError as error:
        alone = "Native CPU kernels are built for this process only, at every start: %s; %s"
        logger.warning(alone, error, KEEP)
        unusable = error
    with tempfile.TemporaryDirectory(prefix="vllm-gaudi-ucm-") as folder:
        try:
            return ctypes.CDLL(str(build(Path(folder)))), str(unusable)
        except CacheError as error:
            raise BuildError(f"{unusable}; {error}") from error


def is_rows(x: Tensor) -> bool:
    """True if x is fp32 [rows, columns] on the CPU with dense rows; there may be gaps between rows."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1 and x.is_cpu


HALF_TYPES = {torch.bfloat16: 1, torch.float16: 2}
"""The numbers by which kernels know the dtypes."""


def is_half_rows(x: Tensor) -> bool:
    """True if x is bfloat16 or float16 [rows, columns] on the CPU with dense rows; rows may lie apart."""
    return x.dtype in HALF_TYPES and x.dim() == 2 and x.stride(1) == 1 and x.is_cpu
