"""Machine code of a compiled kernel: uniform registers that are read and were never written.

The ptxas of Triton 3.6 lost the first write of an address of shared memory in one kernel. Such a kernel reads what
happens to be in the register, and no test of values finds that for certain.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?);")
UNIFORM = re.compile(r"\bUR(\d+)\b")
# Descriptors of a product's operands: both, or the second only where the first is in registers.
DESCRIPTORS = re.compile(r"(, R\d+)?, gdesc\[UR(\d+)\]")
WRITES_UNIFORM = ("U", "R2UR", "S2UR", "REDUX", "VOTEU", "CS2UR", "LDCU")


def never_written(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which no instruction before them has written, each with its place."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    instructions = [match.groups() for match in map(INSTRUCTION.match, listing.splitlines()) if match]
    assert instructions, "no instruction was understood"
    written: set[int] = set()
    found = []
    for place, operation, operands in instructions:
        target = re.match(r"UR(\d+)\b", operands) if operation.startswith(WRITES_UNIFORM) else None
        if not read_registers(operands[target.end() :] if target else operands) <= written:
            found.append(f"{place}: {operation} {operands}")
        if target:
            first = int(target[1])
            written |= set(range(first, first + width(operation)))
    return found


def read_registers(operands: str) -> set[int]:
    read = {int(number) for number in UNIFORM.findall(operands)}
    if descriptors := DESCRIPTORS.search(operands):
        first = int(descriptors[2])
        both = {first, first + 1, first + 2, first + 3}
        read = (read - {first}) | (both - {first, first + 1} if descriptors[1] else both)
    return read


def width(operation: str) -> int:
    return 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
