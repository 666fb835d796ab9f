"""Tells the weights of two folders apart without reading them whole: KV of other weights must never be used."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import BinaryIO

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
INDEX = ".safetensors.index.json"
"""Ends the name of the file that says which of the others are loaded."""

# Read of a tensor: all of a small one, else pieces from its beginning to its end.
PIECES, PIECE_BYTES = 8, 2 << 10
LONGEST_HEADER = 100_000_000
"""Of a safetensors file, as its own library has it."""
# Of a file that does not say where its tensors are, as many parts are sampled like a tensor.
PARTS = 1024

Extent = tuple[int, int]
"""First byte, and the one after the last."""


def weights_digest(model: str) -> str:
    """Digest of all weight files: names, sizes, what they say of their tensors, and samples of every tensor, as
    hexadecimal digits. Neither place nor times: a copy has the same. Empty where `model` is no folder with weights.

    At most 16 KiB of a tensor are read: 5 MB in 3,000 calls for a model of 8 billion parameters. Training changes
    every element of the tensors that it trains, which the samples see. They may miss a change of single elements or
    rows, such as those of one token in an embedding, where these lie between the pieces; archives of torch (.bin, .pt)
    hold a checksum of each tensor, so that nothing is missed there. Of other formats a change of less than a 1024th of
    the file may be missed.
    """
    folder = Path(model)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith((*SUFFIXES, INDEX)))
    if not any(path.suffix in SUFFIXES for path in files):
        return ""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb", buffering=0) as content:
            size = os.fstat(content.fileno()).st_size
            digest.update(f"{file.relative_to(folder)}\0{size}\0".encode())
            if file.suffix in SUFFIXES:
                described, tensors = _structure(content, size)
                _add_samples(digest, content.fileno(), tensors)
            else:
                described = content.readall()
            digest.update(hashlib.sha256(described).digest())
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, file: int, extents: Iterable[Extent]) -> None:
    for start, end in extents:
        room = end - start - PIECE_BYTES
        if end - start <= PIECES * PIECE_BYTES:
            digest.update(os.pread(file, end - start, start))
            continue
        for piece in range(PIECES):
            digest.update(os.pread(file, PIECE_BYTES, start + room * piece // (PIECES - 1)))


def _structure(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """What the file says of its tensors, and where they are."""
    for read in (_safetensors, _archive):
        try:
            return read(file, size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zipfile.BadZipFile):
            continue  # not of this format, or broken, which is for the loader to say
    return b"", [(size * part // PARTS, size * (part + 1) // PARTS) for part in range(PARTS)]


def _safetensors(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """The header, and the tensors in its order."""
    prefix = os.pread(file.fileno(), 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    begin = 8 + length
    if begin > size or length > LONGEST_HEADER:
        raise ValueError("no header")
    header = os.pread(file.fileno(), length, 8)
    extents = []
    for name, tensor in json.loads(header).items():
        if name == "__metadata__":
            continue
        start, end = map(index, tensor["data_offsets"])
        if not 0 <= start <= end <= size - begin:
            raise ValueError("a tensor beyond the file")
        extents.append((begin + start, begin + end))
    return header, extents


def _archive(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """An archive of torch: names, sizes and checksums of its members, and the members in their order."""
    members = sorted(zipfile.ZipFile(file).infolist(), key=lambda member: member.header_offset)
    described = json.dumps([(member.filename, member.file_size, member.CRC) for member in members])
    starts = [min(max(member.header_offset, 0), size) for member in members]
    return described.encode(), list(zip(starts, [*starts[1:], size], strict=True))
