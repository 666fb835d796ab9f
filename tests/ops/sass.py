"""Machine code of a compiled kernel: uniform registers that are read and were never written.

The ptxas of Triton 3.6 lost the first write of an address of shared memory in one kernel. Such a kernel reads what
happens to be in the register, and no test of values finds that for certain.
"""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
INSTRUCTION_BYTES = 16
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?);")
UNIFORM = re.compile(r"\bUR(\d+)\b")
# Descriptors of a product's operands: both, or the second only where the first is in registers.
DESCRIPTORS = re.compile(r"(, R\d+)?, gdesc\[UR(\d+)\]")
CALLED = re.compile(r"0x([0-9a-f]+)")
WRITES_UNIFORM = ("U", "R2UR", "S2UR", "REDUX", "VOTEU", "CS2UR", "LDCU")


def never_written(cubins: Mapping[str, bytes]) -> list[str]:
    """Instructions that read a uniform register which no instruction before them has written, each with its place.

    cubins: of one kernel each, by a name for the report; all for a Hopper.
    """
    codes = {name: machine_code(cubin) for name, cubin in cubins.items()}
    instructions = iter(disassemble(b"".join(codes.values())))
    found = []
    for name, code in codes.items():
        own = list(itertools.islice(instructions, len(code) // INSTRUCTION_BYTES))
        found += [f"{name}: {one}" for one in unwritten_reads(own)]
    return found


def uses_local(cubin: bytes) -> bool:
    """Whether the kernel keeps what its registers have no room for in memory."""
    return any(operation.startswith(("STL", "LDL")) for _, operation, _ in disassemble(machine_code(cubin)))


def machine_code(cubin: bytes) -> bytes:
    """The one section of an ELF file that holds the instructions of its kernel."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + index * size) for index in range(count)]
    place_of_names = sections[names][4]
    found = []
    for name, _, _, _, begin, length in sections:
        place = place_of_names + name
        if cubin[place : cubin.index(0, place)].startswith(b".text."):
            found.append(cubin[begin : begin + length])
    (code,) = found
    return bytes(code)


def disassemble(code: bytes) -> list[tuple[str, ...]]:
    """Address, operation and operands of each instruction. One process: its start takes longer than most kernels."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [NVDISASM, "--binary", "SM90a", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = [match.groups() for match in map(INSTRUCTION.match, listing.splitlines()) if match]
    assert len(instructions) == len(code) // INSTRUCTION_BYTES > 0, "not every instruction was understood"
    return instructions


def unwritten_reads(instructions: Sequence[tuple[str, ...]]) -> list[str]:
    """As `never_written`, of one kernel. What it calls, as a division of 64 bits, has written what stands there."""
    begin = int(instructions[0][0], 16)
    written: set[int] = set()
    found = []
    for place, operation, operands in instructions:
        if operation.startswith("CALL.REL") and (called := CALLED.search(operands)):
            written |= _written_by_call(instructions[(int(called[1], 16) - begin) // INSTRUCTION_BYTES :])
        target = _target(operation, operands)
        if not read_registers(operands[target.end() :] if target else operands) <= written:
            found.append(f"{int(place, 16) - begin:04x}: {operation} {operands}")
        written |= _written(operation, target)
    return found


def _written_by_call(instructions: Sequence[tuple[str, ...]]) -> set[int]:
    body = itertools.takewhile(lambda one: not one[1].startswith("RET"), instructions)
    return set().union(*(_written(operation, _target(operation, operands)) for _, operation, operands in body))


def _target(operation: str, operands: str) -> re.Match[str] | None:
    if operation == "ELECT":
        # writes a predicate first, and then the number of the chosen thread
        return re.match(r"P\w+, UR(\d+)\b", operands)
    return re.match(r"UR(\d+)\b", operands) if operation.startswith(WRITES_UNIFORM) else None


def _written(operation: str, target: re.Match[str] | None) -> set[int]:
    return set() if target is None else set(range(int(target[1]), int(target[1]) + width(operation)))


def read_registers(operands: str) -> set[int]:
    read = {int(number) for number in UNIFORM.findall(operands)}
    if descriptors := DESCRIPTORS.search(operands):
        first = int(descriptors[2])
        both = {first, first + 1, first + 2, first + 3}
        read = (read - {first}) | (both - {first, first + 1} if descriptors[1] else both)
    return read


def width(operation: str) -> int:
    return 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
