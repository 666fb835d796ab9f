"""Commands and parts of the package `vllm-gaudi-ucm-tools`, found by its entry points.

A server runs without that package, and this one imports it only when a command or an option needs it.
"""

from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, version
from typing import Any

DISTRIBUTION = "vllm-gaudi-ucm-tools"
COMMANDS = "vllm_gaudi_ucm.commands"
PARTS = "vllm_gaudi_ucm.parts"


class MissingToolsError(RuntimeError):
    """The package of tools is not installed, or is from another release."""


def is_installed() -> bool:
    """Returns whether the package is there, of any release."""
    return _installed() is not None


def installed_commands() -> dict[str, EntryPoint]:
    """Returns commands by name, in alphabetical order; none if the package is not installed."""
    found = _installed()
    points = [] if found is None else found.entry_points.select(group=COMMANDS)
    return {point.name: point for point in sorted(points)}


def load_part(name: str, asked_by: str) -> Any:
    """Imports a part.

    Args:
        name: its entry point in the group `PARTS`.
        asked_by: the option that needs it, for the error.

    Raises:
        MissingToolsError: it is not installed.
    """
    found = _installed()
    points = () if found is None else found.entry_points.select(group=PARTS, name=name)
    for point in points:
        check_release()
        return point.load()
    raise missing_tools(asked_by)


def missing_tools(asked_by: str) -> MissingToolsError:
    return MissingToolsError(
        f"{asked_by} needs the package {DISTRIBUTION}, which is not installed; pip install 'vllm-gaudi-ucm[tools]' "
        "brings it (in a clone of the repository: pip install ./tools)"
    )


def check_release() -> None:
    """Raises MissingToolsError if the tools are from another release than this package.

    Versions between releases are not compared: an editable install keeps the one it was made at.
    """
    from packaging.version import Version

    ours, theirs = Version(version("vllm-gaudi-ucm")), Version(version(DISTRIBUTION))
    between = any(one.is_devrelease or one.local is not None for one in (ours, theirs))
    if ours != theirs and not between:
        raise MissingToolsError(
            f"found {DISTRIBUTION} {theirs}, expected {ours}, the version of vllm-gaudi-ucm; "
            f"pip install '{DISTRIBUTION}=={ours}'"
        )


def _installed() -> Distribution | None:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
