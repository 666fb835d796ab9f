"""A folder with vLLM's tests and without its package, and the environment in which they run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

# the package itself stays out: it would hide the installed one
WANTED = ("tests", "examples", "benchmarks", "docs", "pyproject.toml")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_GAUDI_UCM_DEVICE": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_tree(sources: Path, tree: Path) -> Path:
    """Copies the tests, and what they read, from vLLM's sources to the folder `tree` unless they are there.

    Raises FileNotFoundError if the sources have no tests.
    """
    if tree.is_dir():
        return tree
    if not (sources / "tests").is_dir():
        raise FileNotFoundError(
            f"{sources}: found no folder `tests`; expected the unpacked source distribution of vLLM"
        )
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".partial-") as temporary:
        made = Path(temporary) / "tree"
        made.mkdir()
        for name in WANTED:
            source = sources / name
            if source.is_dir():
                shutil.copytree(source, made / name)
            elif source.exists():
                shutil.copy(source, made / name)
        made.rename(tree)
    return tree


def files_of(tree: Path, tests: Iterable[str]) -> set[str]:
    """Returns the files with tests that are among `tests`, files and folders of `tree`, or below them."""
    found = [file for test in tests for file in (tree / test, *(tree / test).rglob("test_*.py")) if file.is_file()]
    return {file.relative_to(tree).as_posix() for file in found}


def environment(hub: Path, plugin: bool) -> dict[str, str]:
    """The variables of the tests' processes: offline, on the CPU, with this folder as the hub's cache.

    Args:
        hub: what `make_hub` returned.
        plugin: whether vLLM loads this plugin; otherwise it takes its own CPU platform.
    """
    variables = {**os.environ, **ENVIRONMENT, "HF_HUB_CACHE": str(hub)}
    # some start `vllm serve`
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # set by a `make` or a pytest that runs this
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        variables.pop(name, None)
    if not plugin:
        variables |= {"VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}
        del variables["VLLM_GAUDI_UCM_DEVICE"]
    return variables
