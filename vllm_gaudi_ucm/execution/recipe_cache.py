"""The folder where compiled recipes stay for the next start: Gaudi's recipe cache, or inductor's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.envs import use_hpu_recipe_cache, use_inductor_cache
from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.execution.graph_kind import GraphKind

logger = plugin_logger(__name__)


class RecipeCacheError(ValueError):
    """A folder that cannot be used, or graphs that no folder can keep."""


def open_recipe_cache(folder: Path, device: Device, kind: GraphKind) -> None:
    """Makes the device, or inductor, keep its recipes in `folder`. Before the device is started: it reads this once.

    Raises:
        RecipeCacheError: the folder cannot be made, or these graphs are not kept on disk.
    """
    if device.kind != "hpu" and kind != "compile":
        raise RecipeCacheError(
            f"ucm.graphs.recipe_cache: found {folder}, but on {device.kind} only ucm.graphs.mode 'compile' compiles "
            "what a folder could keep; leave the option out, or set the mode"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeCacheError(
            f"ucm.graphs.recipe_cache: cannot use {folder}: {error.strerror or error}; expected a folder, or a path "
            "where one can be made"
        ) from error
    if device.kind == "hpu":
        use_hpu_recipe_cache(folder)
    else:
        use_inductor_cache(folder)


def log_cache_hits(folder: Path, device: Device, graphs: int) -> None:
    """One line of what came from the folder while `graphs` graphs were warmed."""
    if device.kind == "hpu":
        logger.info(
            "Recipe cache %s: %d recipes were compiled for %d graphs, the others came from the cache",
            folder,
            device.compilations(),
            graphs,
        )
        return
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    logger.info(
        "Recipe cache %s: %d recipes came from the cache, %d were compiled",
        folder,
        found["fxgraph_cache_hit"],
        found["fxgraph_cache_miss"],
    )
