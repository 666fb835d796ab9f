"""The bench of a probe: the device, the mode, sizes, and a way to report findings."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from vllm_gaudi_ucm.device import Device, get_device
from vllm_gaudi_ucm_tools.first_hour.loading import loading

F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = {"hpu": "hpu_backend", "cuda": "inductor", "cpu": "aot_eager"}
HPU_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"force_static_compile": True}
LONGEST_ERROR = 200
MOST_SHAPES = 4096


class Say(Protocol):
    """Reports a finding to the process that writes the report."""

    def __call__(self, kind: str, **values: Any) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """A call that may fail: its value, or the first line of its error."""

    value: Any
    error: str

    @property
    def ok(self) -> bool:
        return not self.error


class Bench:
    """The bench of one process.

    Args:
        say: reports a finding.
        kind: `hpu`, `cuda` or `cpu`.
        mode: `stock`, `eager`, `compile` or `lazy`.
        case: the probe's case, "" if it has none.
        sizes: `small` or `full`.
        model: folder of the model to serve, "" for a small random one.
        folder: an empty folder for what the probe writes.
        minutes: how long to serve.

    """

    def __init__(
        self, say: Say, kind: str, mode: str, case: str, sizes: str, model: str, folder: str, minutes: float
    ) -> None:
        self._say = say
        self.kind, self.mode, self.case = kind, mode, case
        self.full = sizes == "full"
        self.model = model
        self.folder = Path(folder)
        self.minutes = minutes
        self.device: Device = get_device(kind)

    @contextmanager
    def started(self) -> Iterator[None]:
        """A context around the probe: loads the bridge, and makes a shape too many for Dynamo an error, not an eager
            call.

        Raises Refused if torch refuses lazy mode, as it should.
        """
        if self.kind == "hpu":
            with loading(self.mode):
                importlib.import_module("habana_frameworks.torch")
        torch.manual_seed(0)
        limits = {"recompile_limit": MOST_SHAPES, "accumulated_recompile_limit": MOST_SHAPES}
        with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
            yield

    @cached_property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        return self.device.torch_device()

    # findings

    def claim(self, name: str, found: object, expected: object, ok: bool | None = None) -> bool:
        """Reports a value that is known in advance; `ok` if equality does not decide."""
        holds = found == expected if ok is None else ok
        self._say("claim", name=name, found=str(found), expected=str(expected), ok=bool(holds))
        return bool(holds)

    def answer(self, name: str, text: object) -> None:
        """Part of the answer to an open question."""
        self._say("answer", name=name, text=str(text))

    def measure(self, name: str, value: float, unit: str) -> None:
        """A figure, measured here; one that is not finite is raw data alone."""
        if not math.isfinite(value):
            self.note(name, f"{value} {unit}")
            return
        self._say("measure", name=name, value=float(value), unit=unit)

    def series(self, name: str, x: str, y: str, points: Sequence[tuple[float, float]]) -> None:
        """Points of a plot; `x` and `y` name the axes with their units. Points that are not finite are left out."""
        kept = [[float(a), float(b)] for a, b in points if math.isfinite(a) and math.isfinite(b)]
        self._say("series", name=name, x=x, y=y, points=kept)

    def note(self, name: str, value: object) -> None:
        """Raw data that no cell shows."""
        self._say("note", name=name, value=value)

    # how it is found

    def pick(self, small: Any, full: Any) -> Any:
        """One of two sizes."""
        return full if self.full else small

    def region(self, function: F, **options: Any) -> F:
        """Returns the function as the mode runs it: compiled, or unchanged; in lazy mode each call is a recipe.

        options: of `torch.compile`, in addition to a static compilation.
        """
        if self.mode == "compile":
            found = {"dynamic": False, **options}
            if self.kind == "hpu":
                found["options"] = HPU_OPTIONS
            return cast(F, torch.compile(function, backend=BACKENDS[self.kind], **found))
        if self.mode != "lazy":
            return function

        def cut(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            self.device.end_recipe()
            return result

        return cast(F, cut)

    def seconds(self, call: Callable[[], object], times: int = 5) -> float:
        """The shortest of some calls, after one that is not counted; waits for the device."""
        call()
        self.device.synchronize()
        shortest = math.inf
        for _ in range(times):
            begin = time.perf_counter()
            call()
            self.device.synchronize()
            shortest = min(shortest, time.perf_counter() - begin)
        return shortest

    def timed(self, call: Callable[[], object]) -> float:
        """Returns the seconds of one call, including the first: the cost of a compilation."""
        self.device.synchronize()
        begin = time.perf_counter()
        call()
        self.device.synchronize()
        return time.perf_counter() - begin

    def compilations(self, call: Callable[[], object]) -> int:
        """Returns the recipes that a call compiles; if the device compiles none, the graphs of Dynamo."""
        before = self._compiled()
        call()
        self.device.synchronize()
        return self._compiled() - before

    def _compiled(self) -> int:
        if self.kind == "hpu":
            return self.device.compilations()
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def device_seconds(self, call: Callable[[], object], times: int = 20) -> float | None:
        """Returns the seconds of one call, between two events of the device around several calls; None if it has no
        events.

        The host launches all of them first: if it is slower than the device, its time counts.
        """
        if self.kind == "cpu":
            return None
        call()
        begin, end = (vars(torch)[self.kind].Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        self.device.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def peak_memory(self, call: Callable[[], object]) -> int | None:
        """Returns the peak of bytes in use during a call, beyond those before it; None if they are not counted."""
        if self.kind == "cpu":
            call()
            return None
        counter: Any = vars(torch)[self.kind]
        self.device.synchronize()
        counter.reset_peak_memory_stats()
        before = counter.memory_allocated()
        call()
        self.device.synchronize()
        return int(counter.max_memory_allocated() - before)

    def used_memory(self) -> int:
        """Returns the bytes of the device in use, according to its driver."""
        memory = self.device.memory()
        return memory.total - memory.free

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values, drawn on the host so that every device gets the same."""
        return torch.randn(*shape).to(dtype).to(self.torch_device)

    def integers(self, *shape: int, high: int) -> Tensor:
        """int64 below `high`, drawn on the host."""
        return torch.randint(high, shape).to(self.torch_device)


def attempt(call: Callable[[], Any]) -> Attempt:
    """The call's value, or its error."""
    try:
        return Attempt(call(), "")
    except Exception as error:
        return Attempt(None, one_line(error))


def one_line(error: BaseException) -> str:
    """Type and text of an error, short."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:LONGEST_ERROR]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest error over the largest value; infinite if a value is not finite."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(torch.isfinite(found).all()):
        return math.inf
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
