"""Prints the requirements of an installed distribution, without torch and its companions, as lines of a requirements
file.

usage: python scripts/requirements_of.py DISTRIBUTION [--unmet]

--unmet: only what this environment lacks, or has in another version. pip adds the requirements of missing ones.
"""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

# torch is installed before, in the build and version that fit; the others are for images and sound and would pull
# another torch.
LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


def requirements(distribution: str, unmet: bool = False) -> list[str]:
    """Requirements of `distribution` that apply to this machine, no extras; unmet: only what is not installed so."""
    parsed = (Requirement(line) for line in requires(distribution) or [])
    return [
        f"{requirement.name}{'[' + ','.join(sorted(requirement.extras)) + ']' if requirement.extras else ''}"
        f"{requirement.specifier}"
        for requirement in parsed
        if requirement.name.lower() not in LEFT_OUT
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and not (unmet and _is_met(requirement))
    ]


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    for line in requirements(sys.argv[1], unmet="--unmet" in sys.argv[2:]):
        print(line)
