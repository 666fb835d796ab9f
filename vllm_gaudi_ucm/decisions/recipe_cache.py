"""The folder where compiled recipes stay for the next start: Gaudi's recipe cache, or inductor's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.envs import (
    hpu_recipe_cache,
    inductor_cache,
    use_hpu_recipe_cache,
    use_inductor_cache,
    user_cache,
)
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.private_folder import make_private_folder

if TYPE_CHECKING:
    from vllm_gaudi_ucm.decisions.graph_kind import GraphKind
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)


class RecipeCacheError(ValueError):
    """A folder that cannot be used, or graphs that no folder can keep."""


def open_recipe_cache(folder: Path | None, device: Device, kind: GraphKind) -> None:
    """Makes the device, or inductor, keep its recipes in `folder`. Before the device is started: it reads this once.

    Its contents are executed, so no other user may write to it: neither to `folder` nor, if an environment variable
    overrides it or `folder` is None, to the one that is used instead.

    Raises:
        RecipeCacheError: the folder cannot be made, others may write to it, or these graphs are not kept on disk.
    """
    on_hpu = device.kind == "hpu"
    if folder is not None:
        check_recipe_cache(folder, device.kind, kind)
    elif not on_hpu and kind != "compile":
        return
    chosen = hpu_recipe_cache() if on_hpu else inductor_cache()
    if chosen is not None:
        _make(chosen, f"environment variable {'PT_HPU_RECIPE_CACHE_CONFIG' if on_hpu else 'TORCHINDUCTOR_CACHE_DIR'}")
    elif folder is not None:
        _make(folder, "ucm.graphs.recipe_cache")
        (use_hpu_recipe_cache if on_hpu else use_inductor_cache)(folder)
    elif not on_hpu:
        _check_inductors_own()


def _check_inductors_own() -> None:
    """Returns inductor's own folder if no other user may write to it, otherwise one in the user's cache."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    try:
        # its name in the temporary folder can be foreseen, so another user may have made it
        make_private_folder(Path(default_cache_dir()))
        return
    except OSError as error:
        logger.warning("Inductor's folder is not used: %s", error)
    try:
        folder = user_cache() / "inductor"
    except RuntimeError as error:
        raise RecipeCacheError(f"ucm.graphs.recipe_cache: not set, and {error}; set one of them") from error
    _make(folder, "ucm.graphs.recipe_cache is not set")
    use_inductor_cache(folder)


def _make(folder: Path, where: str) -> None:
    try:
        make_private_folder(folder)
    except OSError as error:
        raise RecipeCacheError(
            f"{where}: cannot use {folder}: {error.strerror or error}; expected a folder, or a path where one can be "
            "made"
        ) from error


def check_recipe_cache(folder: Path, device_kind: str, kind: GraphKind) -> None:
    """Raises RecipeCacheError if no folder keeps such graphs."""
    if device_kind != "hpu" and kind != "compile":
        raise RecipeCacheError(
            f"ucm.graphs.recipe_cache: found {folder}, but on {device_kind} only ucm.graphs.mode 'compile' compiles "
            "what a folder could keep; leave the option out, or set the mode"
        )


def compiled_recipes(device: Device) -> int:
    """Returns how many recipes this process has compiled since it took its device, without those from a folder."""
    if device.kind == "hpu":
        return device.compilations()
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_miss"])


def log_cache_hits(folder: Path, device: Device, graphs: int) -> None:
    """Logs one line on the graphs that came from the folder while `graphs` graphs were warmed."""
    if device.kind == "hpu":
        logger.info(
            "Recipe cache %s: %d recipes were compiled until %d graphs were warm, the others came from the cache",
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
