"""Compiles the Triton kernels of a computation in parallel, before it runs: one after the other, they take half a
minute.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of kernels that are compiled, and of all; from any thread."""

_UNWRITTEN = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class _NothingUnwritten(TorchDispatchMode):
    """New memory holds zeros, which are valid as indices: the kernels that would write it are not launched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN:
            found.zero_()
        return found


@dataclass(frozen=True)
class _Kernel:
    """A kernel that Triton has described but not compiled. function: its `JITFunction`."""

    function: Any
    described: str

    def compile(self) -> None:
        from triton.runtime._async_compile import FutureKernel

        found = self.function.preload(self.described)
        if isinstance(found, FutureKernel) and found.future is not None:
            # set by the thread that has compiled it
            found.future.add_done_callback(_make_launcher)

    @property
    def length(self) -> int:
        """Length of its source, as an estimate of the time that compiling takes."""
        return len(self.function.fn.__code__.co_code)


def _make_launcher(compiled: Future[Any]) -> None:
    """Builds the launcher of a kernel in advance. Triton 3.6 compiles one in C for each list of types at the first
    launch: a third of a second each, one after the other. Built here, it is already on disk. Later releases need none.
    """
    from triton.runtime import driver

    if compiled.exception() is not None:
        return
    try:
        driver.active.launcher_cls(compiled.result().src, compiled.result().metadata)
    except Exception as error:  # any error of any Triton release: the launch builds it then
        logger.debug("the launcher of a kernel is built at its first launch: %s", error)


@dataclass
class FoundKernels:
    """The kernels that a computation launches and this process had not compiled.

    compiled: how many of them were not on disk from an earlier process either; known once all are compiled.
    """

    kernels: dict[str, _Kernel] = field(default_factory=dict)
    compiled: int = 0

    @property
    def count(self) -> int:
        return len(self.kernels)

    def mark(self) -> Path:
        """Returns the path of a marker file next to the kernels on disk, named after the kernels found so far. If it
        exists, these kernels were handled before. It is deleted with Triton's folder; its name covers sources, sizes,
        Triton and the GPU.
        """
        from triton import knobs
        from triton.runtime import driver

        parts = [repr(driver.active.get_current_target())]
        for name, kernel in sorted(self.kernels.items()):
            parts += [name, kernel.function.cache_key, kernel.described]
        return Path(knobs.cache.dir) / f"vllm-gaudi-ucm-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"


def _nobody_watches(done: int, total: int) -> None:
    pass


@contextmanager
def compiled_side_by_side(progress: Progress = _nobody_watches) -> Iterator[FoundKernels]:
    """Inside this context, kernels that are not compiled yet are not launched, so results are meaningless. When it
    exits, all of them have been compiled, by one thread per core.

    Threads are enough: the compiler holds Python's lock for a tenth of its time, and processes would each import torch.
    A kernel that cannot be compiled this way is compiled when it is launched. Requires `has_kernels`.
    """
    from triton import knobs

    found = FoundKernels()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool:  # Triton's names
        found.kernels[f"{fn.name} {key}"] = _Kernel(fn.jit_function, compile["specialization_data"])
        # it is neither compiled now nor launched
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with _NothingUnwritten():
            yield found
    finally:
        knobs.runtime.jit_cache_hook = before
    if found.kernels:
        with _missing_on_disk() as missing:
            _compile(found, progress)
        found.compiled = len(missing)


@contextmanager
def _missing_on_disk() -> Iterator[list[str]]:
    """Yields the names of the kernels that are actually compiled inside the context."""
    from triton import knobs

    names: list[str] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:  # Triton's names
        if not cache_hit:
            names.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    knobs.compilation.listener = listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before


class _Threads(ThreadPoolExecutor):
    """A pool of one thread per core that reports each compiled kernel."""

    def __init__(self, total: int, progress: Progress) -> None:
        super().__init__(os.cpu_count())
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._done += 1
            self._progress(self._done, self._total)


def _compile(found: FoundKernels, progress: Progress) -> None:
    from triton.runtime._async_compile import AsyncCompileMode

    progress(0, found.count)
    with _Threads(found.count, progress) as pool, AsyncCompileMode(pool, ignore_errors=True):
        # the longest first, or it would finish alone
        for kernel in sorted(found.kernels.values(), key=lambda kernel: kernel.length, reverse=True):
            try:
                kernel.compile()
            except Exception as error:  # any error of any Triton release about the description: the launch compiles it
                logger.debug("a kernel is compiled when it is launched: %s", error)
