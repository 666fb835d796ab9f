"""The matrix unit of x86 CPUs (AMX): native kernels use it to multiply fp32 as sums of bfloat16, if it is enabled.

One switch serves all kernels of the process; each call of a kernel reads it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

_REASONS = (
    "the CPU has no matrix unit (AMX with bfloat16), or the compiler does not know it",
    "Linux, or a sandbox, does not let this process use the CPU's matrix unit",
    "",
)


def available() -> bool:
    """True if the kernels can use it in this process. The first call may build them."""
    return not why_not()


def why_not() -> str:
    """Returns why `available()` is False, in words for a log; empty if it is True."""
    library = native()
    return why_not_native() if library is None else _REASONS[library.ucm_matrix_tiles()]


def use(wanted: bool) -> None:
    """Lets kernels use it if it is available, or forbids it. The default is to use it."""
    library = native()
    if library is not None:
        library.ucm_use_matrix_tiles(int(wanted))


def in_use() -> bool:
    """True if it is available and enabled."""
    library = native()
    return library is not None and bool(library.ucm_uses_matrix_tiles())


@contextmanager
def using(wanted: bool) -> Iterator[None]:
    """Calls `use` for the duration of a context, for comparisons; restores the previous setting."""
    before = in_use()
    use(wanted)
    try:
        yield
    finally:
        use(before)
