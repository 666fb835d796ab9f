"""One operator of a stream, as far as its cost goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Access(NamedTuple):
    """Bytes [begin, end) of a memory that an operator touches.

    used: bytes of these that it needs. chosen: an index chooses those, so nobody knows where they are.
    """

    memory: int
    begin: int
    end: int
    used: int
    chosen: bool = False


@dataclass(frozen=True)
class Operation:
    """matrix: FLOPs of a matrix product. vector: elements that other arithmetic goes over, in units of two bytes."""

    name: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    matrix: int
    vector: float
