"""Doctor's section on what a server writes: the phase log and the folder of recipes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.output_file import why_not_writable
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.execution.graph_kind import graph_kind
from vllm_gaudi_ucm.execution.recipe_cache import RecipeCacheError, check_recipe_cache

SECTION = "files"


def place_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """The section's rows, for a server on `device` that is started without --enforce-eager; none without options."""
    if config.phase_log is not None:
        yield _phase_log(config.phase_log)
    if config.graphs.recipe_cache is not None and device is not None:
        yield _recipe_cache(config, config.graphs.recipe_cache, device)


def _phase_log(path: Path) -> Check:
    name, why_not = "ucm.phase_log", why_not_writable(path)
    if why_not:
        expected = "a file name in a folder that exists and is writable"
        return Check(SECTION, name, "fail", f"{path}: {why_not}", expected, "make the folder, or give another path")
    return Check(SECTION, name, "ok", str(path))


def _recipe_cache(config: UcmConfig, folder: Path, device: str) -> Check:
    name = "ucm.graphs.recipe_cache"
    try:
        kind = graph_kind(config, device, envs.lazy_mode(), enforce_eager=False)
        check_recipe_cache(folder, device, kind)
    except RecipeCacheError as error:
        return Check(SECTION, name, "fail", str(error))
    except ValueError:
        return Check(SECTION, name, "info", f"{folder}, with a mode that the section on static shapes names")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = f"{name}: cannot use {folder}: {there} is no folder that this user may write"
        return Check(SECTION, name, "fail", found, "a folder, or a path where one can be made")
    return Check(SECTION, name, "ok", str(folder))
