"""What a thread is doing on the card: its open stream, and the captured region it is in."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.launch_queue import default_queue
from habana_frameworks.torch.simulator.recipes import recipes
from habana_frameworks.torch.simulator.stream import Stream
from habana_frameworks.torch.simulator.tape import Tape

Place = Literal["card", "host"]


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
        """The host asks for the card's data: what has accumulated must run first. Raises in a captured region."""
        if self.region is not None:
            raise HpuConstraintError(operator, f"a host read inside a region captured by {self.region}")
        self.catch_up()
        self.cut()
        card.host_reads += 1

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


def is_lazy() -> bool:
    """Whether operations accumulate into a graph (PT_HPU_LAZY_MODE other than "0") instead of running eagerly."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"


state = ThreadState()
