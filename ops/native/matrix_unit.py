"""The matrix unit of x86 CPUs (AMX), with which native kernels multiply fp32 as sums of bfloat16: there, and wanted.

The switch is the process's: one for all kernels, read once per call of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_gaudi_ucm.ops.native.library import native, why_not_native

_REASONS = (
    "the CPU has no matrix unit (AMX with bfloat16), or the compiler does not know it",
    "Linux, or a sandbox, does not let this process use the CPU's matrix unit",
    "",
)


def available() -> bool:
    """Whether the kernels can use it on this machine, in this process. The first call may build them."""
    return not why_not()


def why_not() -> str:
    """Why `available()` is False, in words for a log; empty where it is True."""
    library = native()
    return why_not_native() if library is None else _REASONS[library.ucm_matrix_tiles()]


def use(wanted: bool) -> None:
    """Whether kernels may use it where it is available; they may until told otherwise."""
    library = native()
    if library is not None:
        library.ucm_use_matrix_tiles(int(wanted))


def in_use() -> bool:
    """Whether it is available and wanted."""
    library = native()
    return library is not None and bool(library.ucm_uses_matrix_tiles())


@contextmanager
def using(wanted: bool) -> Iterator[None]:
    """`use` for a while, for comparisons; what was wanted before comes back."""
    before = in_use()
    use(wanted)
    try:
        yield
    finally:
        use(before)
