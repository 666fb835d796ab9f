"""PYTHONPATH of a process on the simulated card: its bridge, and the release of Gaudi's software that it plays.

The release is the one that ships the installed torch, and the newest one for a torch that is newer than all of these.
Imports nothing that imports torch: what loads torch, and the bridge with it, is up to the process.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

SIM = Path(__file__).parent / "sim_hpu"
# release of Gaudi's software -> the minor version of torch that it ships
TORCH = {"1.24.1": "2.11", "1.24.2": "2.13"}
NEWEST = "1.24.2"


def played_release(torch: str) -> str:
    """Release of Gaudi's software for a version of torch."""
    found = [release for release, shipped in TORCH.items() if torch.startswith(f"{shipped}.")]
    return found[0] if found else NEWEST


def software_path(release: str) -> str:
    """The path on which the simulated card's bridge says that it is this release."""
    own = SIM / "releases" / release  # the oldest one is in the folder of the bridge itself
    return os.pathsep.join(map(str, [own, SIM] if own.is_dir() else [SIM]))


SIM_PATH = software_path(played_release(version("torch")))
