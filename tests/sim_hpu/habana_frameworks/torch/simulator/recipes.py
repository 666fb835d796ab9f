"""Recipes that the card has compiled, and the folder that keeps them between processes."""

import atexit
import os
import shutil
import threading
import time
from pathlib import Path

from habana_frameworks.torch.internal.bridge_config import compile_only
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.stream import Recipe

CACHE_CONFIG = "PT_HPU_RECIPE_CACHE_CONFIG"
MIB = 1 << 20


class RecipeFolder:
    """Recipes on disk, as `PT_HPU_RECIPE_CACHE_CONFIG="path,delete_on_exit,size_mb"` asks for; one file per recipe.

    Raises ValueError for a configuration of another form.
    """

    def __init__(self, config: str) -> None:
        fields = config.split(",")
        if len(fields) != 3 or not fields[0] or fields[1].lower() not in ("true", "false") or not fields[2].isdigit():
            raise ValueError(f"{CACHE_CONFIG}: found {config!r}, expected 'path,delete_on_exit,size_mb' (a,false,1024)")
        self._folder = Path(fields[0])
        self._limit = int(fields[2]) * MIB
        self._folder.mkdir(parents=True, exist_ok=True)
        if fields[1].lower() == "true":
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    def holds(self, key: str) -> bool:
        return (self._folder / key).exists()

    def add(self, key: str) -> None:
        """Keeps a recipe, and drops the oldest ones beyond the size limit."""
        (self._folder / key).touch()
        now = time.time_ns()  # finer than the file system's own clock
        os.utime(self._folder / key, ns=(now, now))
        files = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        excess = len(files) - max(1, self._limit // card.recipe_bytes)
        for file in files[: max(0, excess)]:
            file.unlink(missing_ok=True)


class RecipeBook:
    """All recipes of this process."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._folder: RecipeFolder | None = None
        self._is_open = False

    def forget(self) -> None:
        """As in a process that has just started; what is on disk stays."""
        with self._lock:
            self._seen.clear()
        memory.forget_workspaces()

    def need(self, recipe: Recipe) -> None:
        """A recipe is about to run: it is compiled unless this process has it or the folder keeps it."""
        key = recipe.key
        if not compile_only():
            memory.first_execution(key, (recipe.operators - 1) * card.workspace_bytes)
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
            if not self._is_open:
                # the bridge reads it when the card is started, not when it is imported
                config = os.environ.get(CACHE_CONFIG, "")
                self._folder, self._is_open = RecipeFolder(config) if config else None, True
            if self._folder is not None and self._folder.holds(key):
                card.cache_hits += 1
                return
            card.compilations += 1
            card.compiled_operators += recipe.operators
            card.recipes.append((key, card.compilation_us + recipe.operators * card.operator_us))
            if self._folder is not None:
                self._folder.add(key)


recipes = RecipeBook()
