"""Counts the recipes that a device would compile after warm-up, on any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from vllm_gaudi_ucm_tools.recipes.recipe import NewRecipe, OperatorStream, Recipe

Check = Literal["count", "fail"]

# Bounds the memory (about 100 bytes each) of a server whose every step is new. Beyond this, a new recipe counts every
# time it occurs, not only the first.
_REMEMBERED = 1 << 17
_NAMED_OPERATORS = 3


class RecipeError(RuntimeError):
    """A recipe that would have been compiled while serving; the message says which and what to do."""


class _Thread(threading.local):
    """The state of a thread: its innermost region, and whether it warms up."""

    stream: OperatorStream | None = None
    warming = False


class RecipeRecorder:
    """Hashes the operators between cuts and tells which recipes are new after warm-up.

    One recipe is the stream of operators of a `recording` region. A nested region cuts the outer one: the outer one's
    operators before and after are recipes of their own, as around a `mark_step`. A region without operators is ignored,
    and so is one that ends with an exception. `OperatorStream` defines which recipes are equal.
    Threads record and warm up independently; what has been seen is common to all.
    """

    def __init__(self, check: Check, *, device_type: str, report: Callable[[NewRecipe], None] | None = None) -> None:
        """check: `count` counts new recipes, `fail` raises for them too. report: called with each new recipe.

        device_type: the device whose recipes are counted (`tensor.device.type`); work on other devices counts as the
            host's.
            Raises ValueError for an unknown check.
        """
        if check not in get_args(Check):
            raise ValueError(f"recipe_check is {check!r}, expected one of {', '.join(get_args(Check))}")
        self._check = check
        self._device_type = device_type
        self._report = report
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._sealed = False
        self._digests: set[bytes] = set()
        self._operators: set[int] = set()
        self._total = 0
        self._new = 0
        self._last_new: NewRecipe | None = None

    @property
    def total(self) -> int:
        """Recipes seen, each once, warm-up included."""
        return self._total

    @property
    def new_recipes(self) -> int:
        """Recipes first seen after `seal` and outside `warming`."""
        return self._new

    @property
    def last_new(self) -> NewRecipe | None:
        """The latest of the new recipes."""
        return self._last_new

    def seal(self) -> None:
        """Ends the warm-up: from now on, a recipe first seen outside `warming` is new. Further calls have no effect."""
        self._sealed = True

    @contextmanager
    def warming(self) -> Iterator[None]:
        """A context in which regions that end in this thread count as warm-up, even after `seal`."""
        before, self._thread.warming = self._thread.warming, True
        try:
            yield
        finally:
            self._thread.warming = before

    @contextmanager
    def recording(self, label: str) -> Iterator[None]:
        """Records one region; `label` names it in reports and is not part of the recipe.

        Raises RecipeError at the region's end, or at an inner one's beginning, if check is `fail` and it was new.
        """
        outer, stream = self._thread.stream, OperatorStream(label, self._device_type)
        if outer is not None:
            self._finish(outer)
            outer.paused = True
        self._thread.stream = stream
        try:
            with stream:
                yield
        finally:
            self._thread.stream = outer
            if outer is not None:
                outer.paused = False
        self._finish(stream)

    def _finish(self, stream: OperatorStream) -> None:
        recipe = stream.cut()
        new = None if recipe is None else self._remember(recipe)
        if new is None:
            return
        if self._report is not None:
            self._report(new)
        if self._check == "fail":
            raise RecipeError(
                f"{new}. Warm up its bucket; if that was done, make every shape and number in it a function of the "
                "bucket; or set recipe_check to 'count' to continue"
            )

    def _remember(self, recipe: Recipe) -> NewRecipe | None:
        """Adds a recipe to the known ones; returns a report if it is new after warm-up, otherwise None."""
        with self._lock:
            if recipe.digest in self._digests:
                return None
            self._total += 1
            new = self._describe(recipe) if self._sealed and not self._thread.warming else None
            if new is not None:
                self._new, self._last_new = self._new + 1, new
            if len(self._digests) < _REMEMBERED:
                self._digests.add(recipe.digest)
            if len(self._operators) < _REMEMBERED:
                self._operators.update(map(hash, recipe.first_at))
            return new

    def _describe(self, recipe: Recipe) -> NewRecipe:
        unknown = [(at, text) for text, at in recipe.first_at.items() if hash(text) not in self._operators]
        return NewRecipe(recipe.label, recipe.operators, recipe.inputs, tuple(unknown[:_NAMED_OPERATORS]), len(unknown))
