"""Checks the content of a release's files: the wheel, and with --bill its bill of materials, too.

usage: python scripts/check_release.py WHEEL [--bill NAME.cdx.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_gaudi_ucm.ops.cpu.native.levels import LEVELS

# files that an environment adds by itself
NOT_ASKED_FOR = frozenset({"pip", "setuptools"})


def wheel_faults(wheel: Path) -> Iterator[str]:
    """Yields the faults of a wheel, in words."""
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = sorted({f"vllm_gaudi_ucm/ops/cpu/native/portable/{level.file}" for level in LEVELS} - names)
    if missing:
        yield f"{wheel} lacks {', '.join(missing)}"


def bill_faults(bill: Path, wheel: Path) -> Iterator[str]:
    """Yields contradictions between the bill of materials and the wheel, in words."""
    about = _metadata(wheel)
    content = json.loads(bill.read_text(encoding="utf-8"))
    root = content["metadata"]["component"]
    found = root["name"], root.get("version")
    if found != (about["Name"], about["Version"]):
        yield f"{bill} is about {found[0]} {found[1]}, expected {about['Name']} {about['Version']}"
    listed = {canonicalize_name(component["name"]) for component in content["components"]}
    requirements = map(Requirement, about.get_all("Requires-Dist", []))
    asked = {canonicalize_name(requirement.name) for requirement in requirements if requirement.marker is None}
    if missing := sorted(asked - listed):
        yield f"{bill} lacks {', '.join(missing)}, which {wheel} requires"
    if foreign := sorted((NOT_ASKED_FOR - asked) & listed):
        yield f"{bill} lists {', '.join(foreign)}, which {wheel} does not require"


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--bill", type=Path)
    arguments = parser.parse_args()
    faults = list(wheel_faults(arguments.wheel))
    if arguments.bill:
        faults += bill_faults(arguments.bill, arguments.wheel)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
