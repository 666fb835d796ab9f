"""Regions of device work that become one recipe each: cut on a device that accumulates work, hashed on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol

from vllm_gaudi_ucm.developer_tools import load_part
from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)


class Recorder(Protocol):
    """The part `recipe-recorder` of the tools, which hashes the operators of a region."""

    @property
    def new_recipes(self) -> int:
        """Returns the number of recipes first seen after `seal`, outside `warming`."""

    def recording(self, label: str) -> AbstractContextManager[None]:
        """Records the work inside this context as one recipe."""

    def warming(self) -> AbstractContextManager[None]:
        """Counts recipes first seen inside this context, in this thread, as warm-up."""

    def seal(self) -> None:
        """Ends the warm-up."""


class RecipeStages:
    """A context for device work; call the object with a label.

    Args:
        device_type: torch's name of the device of the tensors.
        on_new: called for each recipe that was first seen after warm-up.
    """

    def __init__(
        self, device: Device, check: Literal["off", "count", "fail"], device_type: str, on_new: Callable[[], None]
    ) -> None:
        self._device = device
        self._on_new = on_new
        self._recorder: Recorder | None = None
        if check != "off":
            # hashing costs time in every operator
            recorder = load_part("recipe-recorder", "ucm.graphs.recipe_check")
            self._recorder = recorder(check, device_type=device_type, report=self._report)

    @property
    def are_cut(self) -> bool:
        """Returns whether a region has an effect: the device accumulates work, or recipes are recorded."""
        return self._recorder is not None or self._device.kind == "hpu"

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        self._device.end_recipe()
        with self._recorder.recording(label) if self._recorder is not None else nullcontext():
            yield
        self._device.end_recipe()

    def warming(self) -> AbstractContextManager[None]:
        """Returns a context in which recipes first seen in this thread count as warm-up."""
        return nullcontext() if self._recorder is None else self._recorder.warming()

    def seal(self) -> None:
        """Ends the warm-up of the skeleton: a recipe first seen from now on, outside `warming`, is new."""
        if self._recorder is not None:
            self._recorder.seal()

    @property
    def new_recipes(self) -> int:
        """Returns the number of recipes first seen after warm-up; 0 if recipes are not recorded."""
        return 0 if self._recorder is None else self._recorder.new_recipes

    def _report(self, recipe: object) -> None:
        logger.warning("A new recipe after warm-up: %s", recipe)
        self._on_new()
