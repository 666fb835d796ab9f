"""What a thread is doing on the card: its open stream, and the captured region it is in."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.extent import is_in_compiled_call
from habana_frameworks.torch.simulator.launch_queue import default_queue
from habana_frameworks.torch.simulator.recipes import recipes
from habana_frameworks.torch.simulator.stream import Stream
from habana_frameworks.torch.simulator.tape import Tape

import torch

Place = Literal["card", "host"]

LAZY_MODE = "PT_HPU_LAZY_MODE"
TORCH_FORK = "SIM_HPU_TORCH_FORK"


class ThreadState(threading.local):
    """Of one thread.

    stream: operators that wait to be launched, or, in a captured region, the region's.
    region: what captures (`wrap_in_hpu_graph`, `hpu_backend`), None outside.
    tape: where the region's operators are recorded, if they are.
    making: where tensors that are being made belong, None where the operator's inputs tell.
    queue: what was launched on the current stream.
    """

    def __init__(self) -> None:
        self.stream = Stream()
        self.region: str | None = None
        self.tape: Tape | None = None
        self.making: Place | None = None
        self.queue = default_queue

    def cut(self) -> None:
        """Launches what has accumulated as one recipe. Inside of a captured region nothing is launched."""
        if self.region is not None:
            return
        recipe = self.stream.take()
        if recipe is not None:
            recipes.need(recipe)
            card.launches += 1

    def read_on_host(self, operator: object) -> None:
        """The host asks for the card's data: what has accumulated must run first. Raises in a captured region.

        It is also inside of a region where it breaks a compiled function into two graphs (duty 21).
        """
        if self.region is not None:
            raise HpuConstraintError(operator, f"a host read inside a region captured by {self.region}")
        if duties.on(21) and is_in_compiled_call():
            duties.refuse(
                21, operator, "a host read between two graphs of a compiled function", "read after the region"
            )
        self.queue.wait()
        self.cut()
        card.host_reads += 1
        if card.host_read_us:
            time.sleep(card.host_read_us / 1e6)

    def catch_up(self) -> None:
        """What was launched on the current stream runs before what comes now, which does not wait in the queue."""
        if self.region is None:
            self.queue.run()

    def operator_ran(self) -> None:
        """Without lazy mode nothing accumulates: each operator is a recipe."""
        if self.region is None and not is_lazy():
            self.cut()

    @contextmanager
    def make(self, place: Place) -> Iterator[None]:
        """Tensors made inside belong to a place."""
        before, self.making = self.making, place
        try:
            yield
        finally:
            self.making = before

    @contextmanager
    def captured(self, by: str, tape: Tape | None = None) -> Iterator[Stream]:
        """A captured region of its own stream, which the caller takes. An exception inside leaves the region."""
        self.cut()
        self.catch_up()
        before = self.stream, self.region, self.tape
        self.stream, self.region, self.tape = Stream(), by, tape
        try:
            yield self.stream
        finally:
            self.stream, self.region, self.tape = before

    @contextmanager
    def between_clusters(self) -> Iterator[None]:
        """An operator of a region that runs eagerly."""
        before, self.region = self.region, None
        try:
            yield
        finally:
            self.region = before


_LAZY = os.environ.get(LAZY_MODE, "0") != "0"


def is_lazy() -> bool:
    """Whether operations accumulate into a graph (PT_HPU_LAZY_MODE set, not to "0") instead of running eagerly."""
    return _LAZY


def check_flavour() -> None:
    """Raises RuntimeError for lazy mode on upstream torch (duty 2): only the vendor's fork has it."""
    if is_lazy() and os.environ.get(TORCH_FORK, "0") == "0":
        raise RuntimeError(
            f"{LAZY_MODE}={os.environ[LAZY_MODE]}: lazy mode needs the vendor's fork of torch, this is torch "
            f"{torch.__version__}; unset {LAZY_MODE}, or set {TORCH_FORK}=1 to simulate the fork (duty 2)"
        )


state = ThreadState()
