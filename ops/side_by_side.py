"""Compiles the Triton kernels of a computation side by side, before it runs: in turn they take half a minute."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_ucm.ops.registry import why_not_triton

logger = logging.getLogger(__name__)

_UNWRITTEN = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class _NothingUnwritten(TorchDispatchMode):
    """New memory holds zeros, which are valid as indices: kernels that would write it are not launched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN:
            found.zero_()
        return found


def has_kernels(device: torch.device) -> bool:
    """Whether computations on this device launch kernels that Triton compiles."""
    return device.type == "cuda" and why_not_triton(device.type) is None


@contextmanager
def compiled_side_by_side() -> Iterator[Mapping[str, object]]:
    """Within, kernels that are not compiled yet are not launched, so what is computed is worth nothing; on leaving all
    of them have been compiled, by as many threads as there are cores.

    Yields those found so far. One that cannot be compiled so is compiled when it is launched. Only where `has_kernels`.
    """
    from triton import knobs

    wanted: dict[str, Callable[[], object]] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool:  # Triton's names
        data = compile["specialization_data"]
        wanted[f"{fn.name} {key}"] = lambda: fn.jit_function.preload(data)
        # it is not compiled now, and not launched
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with _NothingUnwritten():
            yield wanted
    finally:
        knobs.runtime.jit_cache_hook = before
    _compile(list(wanted.values()))


def _compile(kernels: list[Callable[[], object]]) -> None:
    from triton.runtime._async_compile import AsyncCompileMode

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for compile_one in kernels:
            try:
                compile_one()
            except Exception as error:  # whatever Triton's release says of the description: the launch compiles it
                logger.debug("a kernel is compiled when it is launched: %s", error)
    logger.info("%d kernels compiled side by side", len(kernels))
