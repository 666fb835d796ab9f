"""Prints what an installed distribution requires, without torch's companions, for the environment of a peer."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

# torch is installed before, in the CPU build; the others are for images and sound and would pull another torch.
LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


def peer_requirements(distribution: str) -> list[str]:
    """Requirements of `distribution` that apply to this machine, no extras, as lines of a requirements file."""
    parsed = [Requirement(line) for line in requires(distribution) or []]
    return [
        f"{requirement.name}{'[' + ','.join(sorted(requirement.extras)) + ']' if requirement.extras else ''}"
        f"{requirement.specifier}"
        for requirement in parsed
        if requirement.name.lower() not in LEFT_OUT
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


if __name__ == "__main__":
    print("\n".join(peer_requirements(sys.argv[1])))
