"""`torch.compile` with static shapes: `hpu_backend` on Gaudi, inductor or any other of dynamo's backends elsewhere."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch

from vllm_gaudi_ucm.graphs.runners.base import Replay, StaticFunction

F = TypeVar("F", bound=Callable[..., Any])

HPU_BACKEND = "hpu_backend"
HPU_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"force_static_compile": True}

# Calls before the buckets are known: to measure the largest steps, and the sizes of outputs.
BEFORE_BUCKETS = 64


class _Limits(threading.local):
    """The purpose for which a thread's limits of dynamo were set."""

    most = 0


class StaticCompiler:
    """Compiles regions once for each set of shapes, and keeps dynamo from giving up.

    A region is a function of tensors and modules. Calls with modules of one class and tensors of one shape are one
    graph: no number, string or None may differ between them. Beyond `recompile_limit` (8) dynamo would silently run a
    region eagerly; here the limit follows from the server's buckets, and a call beyond it is an error.

    backend: dynamo's name for it. Raises RuntimeError if `TORCH_COMPILE_DISABLE` switches torch.compile off.
    """

    def __init__(self, backend: str) -> None:
        if torch._dynamo.config.disable:
            raise RuntimeError(
                "ucm.graphs.mode 'compile': found TORCH_COMPILE_DISABLE=1, with which torch.compile runs every region "
                "eagerly; expected it unset. Unset it, or serve without compiling with ucm.graphs.mode 'eager'"
            )
        self.backend = backend
        self._most = BEFORE_BUCKETS
        self._limits = _Limits()
        self._skips_guards = False
        self._options = HPU_OPTIONS if backend == HPU_BACKEND else None

    def expect(self, shapes: int) -> None:
        """Announces that regions are called with at most `shapes` further sets of shapes and kinds of modules."""
        self._most += shapes

    def skip_guards(self) -> None:
        """Makes replays check only what distinguishes graphs. Call it once compilation is over."""
        self._skips_guards = True

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A context around replays. The stance applies to the whole process, so it is reset afterwards: other threads
        may compile.

        Raises RuntimeError if a compilation is needed after all.
        """
        if not self._skips_guards:
            yield
            return
        try:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                yield
        except RuntimeError as error:
            if "skip_guard_eval_unsafe" not in str(error):
                raise
            raise RuntimeError(
                "a step needs a graph that was not compiled while its bucket was warmed, which ucm.graphs.skip_guards "
                "excludes; set it to false, and TORCH_LOGS=recompiles to see what differs"
            ) from error

    def step_region(self, function: F) -> F:
        """Compiles a region that steps call directly, not from a graph of `CompiledRunner`."""
        region = self.region(function)

        def call(*inputs: Any) -> Any:
            with self.replaying():
                return region(*inputs)

        return cast(F, call)

    def region(self, function: F) -> F:
        """Returns the compiled function; the first call with a set of shapes compiles it, in any thread.

        The compiled function raises RuntimeError in a call beyond the expected number.
        """
        compiled = torch.compile(function, backend=self.backend, dynamic=False, options=self._options)

        def call(*inputs: Any, **named: Any) -> Any:
            # settings of one thread do not apply to another (torch 2.13), and buckets are warmed in a thread of their
            # own
            if self._limits.most != self._most:
                self._set_limits()
            try:
                return compiled(*inputs, **named)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise RuntimeError(
                    f"compiled region {function.__qualname__}: found more than {self._most} kinds of calls, expected "
                    f"one for each bucket ({self._most - BEFORE_BUCKETS}); something other than the shapes differs "
                    "between calls: TORCH_LOGS=recompiles names it. ucm.graphs.mode 'eager' serves without compiling"
                ) from error

        return cast(F, call)

    def _set_limits(self) -> None:
        config = torch._dynamo.config
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(config, name, max(getattr(config, name), self._most))
        config.fail_on_recompile_limit_hit = True
        self._limits.most = self._most


class CompiledRunner:
    """Calls a function that calls compiled regions: the first call with an input's shapes compiles them."""

    def __init__(self, function: StaticFunction, compiler: StaticCompiler) -> None:
        self._function = function
        self._compiler = compiler

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        self._function(*inputs)
        return partial(self._replay, inputs)

    def _replay(self, inputs: tuple[Any, ...]) -> None:
        with self._compiler.replaying():
            self._function(*inputs)
