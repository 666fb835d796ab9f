"""How a block lies in a medium: a header that says what it is and what it must add up to, then its bytes.

Header, 64 bytes, little-endian: magic (8), version (uint32), crc32c of all else (uint32), length of the block (uint64),
key (32), zeros (8). The checksum covers the header too, so that no bit of a record can change unnoticed.
"""

from __future__ import annotations

import struct

import crc32c

HEADER_BYTES = 64
_MAGIC, _VERSION = b"UCMBLOCK", 1
_BEFORE_CRC, _AFTER_CRC = struct.Struct("<8sI"), struct.Struct("<Q32s8x")
_CRC = struct.Struct("<I")


def seal(record: memoryview, key: bytes) -> None:
    """Writes the header over the first 64 bytes of `record`, whose rest is the block."""
    _BEFORE_CRC.pack_into(record, 0, _MAGIC, _VERSION)
    _AFTER_CRC.pack_into(record, _BEFORE_CRC.size + _CRC.size, len(record) - HEADER_BYTES, key)
    _CRC.pack_into(record, _BEFORE_CRC.size, _checksum(record))


def is_intact(record: memoryview, key: bytes) -> bool:
    """Whether `record` is a whole record of this key, as it was sealed."""
    if len(record) < HEADER_BYTES:
        return False
    magic, version = _BEFORE_CRC.unpack_from(record, 0)
    (crc,) = _CRC.unpack_from(record, _BEFORE_CRC.size)
    length, echo = _AFTER_CRC.unpack_from(record, _BEFORE_CRC.size + _CRC.size)
    if (magic, version, length, echo) != (_MAGIC, _VERSION, len(record) - HEADER_BYTES, key):
        return False
    return bool(crc == _checksum(record))


def _checksum(record: memoryview) -> int:
    head = crc32c.crc32c(record[: _BEFORE_CRC.size])
    return int(crc32c.crc32c(record[_BEFORE_CRC.size + _CRC.size :], head))
