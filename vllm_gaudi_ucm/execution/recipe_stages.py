"""Regions of device work that become one recipe each: cut on a device that accumulates, hashed where that is asked."""

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
        """Recipes first seen after `seal`, outside of `warming`."""

    def recording(self, label: str) -> AbstractContextManager[None]:
        """Takes what runs in here as one recipe."""

    def warming(self) -> AbstractContextManager[None]:
        """Takes what is first seen in here, in this thread, as warm-up."""

    def seal(self) -> None:
        """Ends the warm-up."""


class RecipeStages:
    """Call it with a label around device work.

    Args:
        device: whose recipes are cut.
        check: `ucm.graphs.recipe_check`.
        device_type: torch's name of the device that tensors are on.
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
        """Whether a region has an effect: the device accumulates work, or recipes are recorded."""
        return self._recorder is not None or self._device.kind == "hpu"

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        self._device.end_recipe()
        with self._recorder.recording(label) if self._recorder is not None else nullcontext():
            yield
        self._device.end_recipe()

    def warming(self) -> AbstractContextManager[None]:
        """What is first seen in here, in this thread, is warm-up."""
        return nullcontext() if self._recorder is None else self._recorder.warming()

    def seal(self) -> None:
        """The skeleton is warm: what is first seen from now on, outside of `warming`, is new."""
        if self._recorder is not None:
            self._recorder.seal()

    @property
    def new_recipes(self) -> int:
        """Recipes first seen after warm-up; 0 where nothing is recorded."""
        return 0 if self._recorder is None else self._recorder.new_recipes

    def _report(self, recipe: object) -> None:
        logger.warning("A new recipe after warm-up: %s", recipe)
        self._on_new()
