"""What lies in the folder of a store where a part of it belongs, and is no such part: a folder, a link, a pipe."""

from __future__ import annotations

from pathlib import Path

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.entries import kind_of

_MOST = 1000
logger = plugin_logger(__name__)


class Strangers:
    """Those that were met, which are left alone: never opened, never removed. The first one is logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._met: dict[str, str] = {}

    def meet(self, name: str, mode: int) -> None:
        """name: below the folder. mode: `st_mode`."""
        if name in self._met or len(self._met) == _MOST:
            return
        if not self._met:
            logger.warning(
                "file store %s: %s is %s where the store has a part of its own; it is left alone, and so are others, "
                "which `gaudi-ucm store verify` names",
                self._folder,
                name,
                kind_of(mode),
            )
        self._met[name] = kind_of(mode)

    def names(self) -> list[str]:
        """Each with its path and what it is."""
        return [f"{self._folder / name} ({kind})" for name, kind in self._met.items()]
