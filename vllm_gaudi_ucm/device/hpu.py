"""A Gaudi card as a device, through the few calls of Gaudi's PyTorch bridge that we rely on."""

import atexit
import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from vllm_gaudi_ucm.device.base import Fence, Memory
from vllm_gaudi_ucm.device.capture_gate import CaptureGate
from vllm_gaudi_ucm.envs import lazy_mode

_own = threading.local()
_GATE = CaptureGate()
"""The gate of the process, which drives one card."""


class HpuDevice:
    """The current Gaudi card of this process."""

    kind = "hpu"
    dist_backend = "hccl"
    pins_host_memory = False

    def take_device(self, index: int) -> None:
        """Takes a card: the driver gives each process a free one of HABANA_VISIBLE_MODULES.

        Importing `hccl` makes that backend known to torch.
        """
        bridge()
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

    def torch_device(self) -> torch.device:
        """The device; its name has no index, because one process drives one card."""
        bridge()
        return torch.device("hpu")

    def name(self) -> str:
        bridge()
        device_type = _experimental()._get_device_type()
        # The bridge's enumeration prints as `synDeviceType.synDeviceGaudi3`.
        return str(getattr(device_type, "name", device_type)).rpartition(".")[2].replace("synDevice", "").upper()

    def synchronize(self) -> None:
        bridge().synchronize()

    def empty_cache(self) -> None:
        """The bridge has no such call: memory is free once nothing refers to it, so cycles are collected."""
        gc.collect()

    def memory(self) -> Memory:
        free, total = bridge().mem_get_info()
        return Memory(int(free), int(total))

    def seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)
        bridge().random.manual_seed_all(seed)

    def enter_thread(self) -> None:
        """The card belongs to the process: asking for the thread's stream is all that a thread needs."""
        bridge().current_stream()

    def fence(self) -> Fence:
        """Returns an event in the thread's current stream, after everything that has accumulated."""
        self.end_recipe()
        event: Fence = bridge().Event()
        event.record()  # type: ignore[attr-defined]  # the bridge's
        return event

    @contextmanager
    def beside_computation(self, after: Fence) -> Iterator[None]:
        """Enters a stream of the thread's own; accumulated operators are launched there before it is left."""
        stream = getattr(_own, "stream", None)
        if stream is None:
            stream = _own.stream = bridge().Stream()
        with _GATE.copying(), bridge().stream(stream):
            try:
                after.wait()
                yield
            finally:
                self.end_recipe()
                stream.synchronize()

    def compilations(self) -> int:
        """Returns the bridge's metric `graph_compilation`, which counts from the first call."""
        return int(dict(_compilation_metric().stats())["TotalNumber"])

    def capturing(self) -> AbstractContextManager[None]:
        """Copies of other threads wait, see CaptureGate."""
        return _GATE.capturing()

    @contextmanager
    def compile_only(self) -> Iterator[bool]:
        """Sets PT_COMPILE_ONLY_MODE; yields False if this bridge lacks the setting or cannot change it.

        False in lazy mode, too: a captured graph takes its memory when it is captured, so it is measured there.
        """
        bridge()
        if lazy_mode():
            yield False
            return
        try:
            settings = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
            setting = settings.env_setting("PT_COMPILE_ONLY_MODE", True)
            setting.__enter__()
        except (ImportError, KeyError):
            yield False
            return
        try:
            yield True
        finally:
            # as if nothing had been raised: after an exception the bridge's own context leaves the setting on
            setting.__exit__(None, None, None)

    def end_recipe(self) -> None:
        """Lazy mode accumulates operators until here; in compile mode there is nothing to cut."""
        bridge()
        if importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy():
            importlib.import_module("habana_frameworks.torch.core").mark_step()


def bridge() -> Any:
    """Returns the module `torch.hpu`, which the bridge registers. Without it, raises an error that says so."""
    try:
        importlib.import_module("habana_frameworks.torch")
    except ImportError as error:
        raise RuntimeError(
            f"device hpu: Gaudi's PyTorch bridge cannot be imported ({error}); install habana-torch-plugin of the "
            "Gaudi software on this machine, or set VLLM_GAUDI_UCM_DEVICE to cpu or cuda"
        ) from error
    return torch.hpu  # type: ignore[attr-defined]  # the bridge adds it


def _experimental() -> ModuleType:
    return importlib.import_module("habana_frameworks.torch.utils.experimental")


@cache
def _compilation_metric() -> Any:
    """Entered once, and left when the interpreter exits: it counts as long as the process runs."""
    bridge()
    context = importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_localcontext("graph_compilation")
    # This also keeps the context alive: it is a generator, which stops counting when it is garbage.
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()
