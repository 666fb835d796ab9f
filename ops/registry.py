"""Implementations of an operation, by name: the devices that each runs on, the cases that it supports, and how one is
chosen.

Uses the standard library only: the configuration asks for the names, which must not import anything heavy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, Generic, TypeVar

from vllm_gaudi_ucm.registry import Registry, is_installed, those_installed

AUTO = "auto"

SpecT = TypeVar("SpecT")
ImplementationT = TypeVar("ImplementationT", bound="Implementation[Any]")


class Implementation(Generic[SpecT]):
    """One way to compute an operation. A subclass is defined next to its code, and imports heavy packages only on use.

    Args:
        name: the name it is registered under.

    devices: the device types on which `auto` considers it; None for all.
    priority: `auto` takes the implementation with the highest priority that is suitable.
    capturable: it reads nothing on the host, so it may run while a graph is captured.
    traceable: torch.compile can trace it.
    """

    devices: ClassVar[frozenset[str] | None] = None
    priority: ClassVar[int] = 0
    capturable: ClassVar[bool] = True
    traceable: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    def unavailable(self, device: str) -> str | None:
        """Returns why it cannot compute on tensors of this device type in this process; None if it can.

        An override may check for packages and compilers, and may allow devices beyond `devices` if asked for by name.
        """
        if self.devices is None or device in self.devices:
            return None
        return f"it is for {', '.join(sorted(self.devices))}, got tensors on {device}"

    def supports(self, spec: SpecT) -> bool:
        """True if it computes what `spec` describes."""
        return True


class Implementations(Registry[type[ImplementationT]]):
    """The implementations of one operation: classes by name, one object of each per process.

    Args:
        operation: its name, for errors.
        group: entry point group for others, as `NAME = "package.module:ClassName"`.
        classes: the built-in ones, as `"package.module:ClassName"`; modules that were left out are skipped.
    """

    def __init__(self, operation: str, group: str, **classes: str) -> None:
        super().__init__(f"implementation of {operation}", group, **those_installed(**classes))
        self.operation = operation
        self._made: dict[str, ImplementationT] = {}
        self._chosen: dict[tuple[object, ...], ImplementationT] = {}

    def make(self, name: str) -> ImplementationT:
        """The implementation of this name, created on the first call. Raises ValueError for an unknown name."""
        found = self._made.get(name)
        if found is None:
            if name not in self:
                known = ", ".join((AUTO, *self.names()))
                raise ValueError(f"{self.operation}: implementation {name!r} is unknown, choose one of {known}")
            found = self._made[name] = self.get(name)(name)
        return found

    def choose(self, name: str, device: str, spec: object = None, *, captured: bool = False) -> ImplementationT:
        """The named implementation or, with `auto`, the suitable one of highest priority. Cached by arguments.

        Args:
            name: an implementation, or `auto`.
            device: type of the tensors' device.
            spec: what to compute; None for what every implementation supports.
            captured: it will run while a graph is captured.

        Raises:
            ValueError: the name is unknown, or nothing is suitable; the message lists the choices and the reasons.
        """
        key = (name, device, spec, captured)
        found = self._chosen.get(key)
        if found is None:
            choose = self._fastest if name == AUTO else partial(self._named, name)
            found = self._chosen[key] = choose(device, spec, captured)
        return found

    def explain(self, device: str, spec: object = None, *, captured: bool = False) -> dict[str, str]:
        """Returns the reason why each implementation is unsuitable, by name; empty for suitable ones."""
        return {name: self._why_not_auto(self.make(name), device, spec, captured) or "" for name in self.names()}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context that forgets at its end what was registered and chosen inside, where choices are made anew."""
        before = self._made, self._chosen
        self._made, self._chosen = {}, {}
        try:
            with super().scope():
                yield
        finally:
            self._made, self._chosen = before

    def _fastest(self, device: str, spec: object, captured: bool) -> ImplementationT:
        # best first: asking whether an implementation is available may build it
        for one in sorted(map(self.make, self.names()), key=lambda one: -one.priority):
            if self._why_not_auto(one, device, spec, captured) is None:
                return one
        reasons = ", ".join(f"{name} ({why})" for name, why in self.explain(device, spec, captured=captured).items())
        wanted = "" if spec is None else f" of {spec}"
        raise ValueError(f"{self.operation}: no implementation{wanted} on {device}: {reasons}")

    def _named(self, name: str, device: str, spec: object, captured: bool) -> ImplementationT:
        one = self.make(name)
        if captured and not one.capturable:
            known = ", ".join((AUTO, *(other for other in self.names() if self.make(other).capturable)))
            raise ValueError(
                f"{self.operation}: implementation {name!r} reads tensors on the host, "
                f"which a captured graph cannot do; choose one of {known}"
            )
        reason = self._why_not(one, device, spec)
        if reason is None:
            return one
        fits = self._fastest(device, spec, captured).name
        raise ValueError(
            f"{self.operation}: implementation {name!r} cannot be used here ({reason}), choose {AUTO!r} or {fits!r}"
        )

    def _why_not_auto(self, one: ImplementationT, device: str, spec: object, captured: bool) -> str | None:
        if one.devices is not None and device not in one.devices:
            return f"it is for {', '.join(sorted(one.devices))}"
        if captured and not one.capturable:
            return "it reads tensors on the host, which a captured graph cannot do"
        return self._why_not(one, device, spec)

    def _why_not(self, one: ImplementationT, device: str, spec: object) -> str | None:
        if (reason := one.unavailable(device)) is not None:
            return reason
        return None if spec is None or one.supports(spec) else f"it does not compute {spec}"


@cache
def has_folders(device: str) -> bool:
    """True if this installation has the folders named after a device, such as `ops/cuda` and `ops/moe/impl/cuda`.

    Without them the references compute there.
    """
    return is_installed(f"vllm_gaudi_ucm.ops.{device}")


@lru_cache(maxsize=8)
def why_not_triton(device: str) -> str | None:
    """Returns why Triton cannot run kernels on this type of device; None if it can.

    Imports Triton to find out, but only for devices where it may work. On a CPU it runs kernels under its interpreter
    (TRITON_INTERPRET=1), which is very slow and meant for tests.
    """
    if device not in ("cpu", "cuda"):
        return f"the kernels are for cuda, the tensors are on {device}"
    if not has_folders("cuda"):
        return "the folders of CUDA's kernels were left out of this installation"
    try:
        from triton import knobs
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device == "cpu" and not knobs.runtime.interpret:
        return "the tensors are on cpu, and TRITON_INTERPRET=1 is not set"
    return None


def has_kernels(device: str) -> bool:
    """True if computations on this type of device launch kernels that Triton compiles."""
    return device == "cuda" and why_not_triton(device) is None
