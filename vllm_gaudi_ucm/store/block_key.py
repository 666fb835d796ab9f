"""Keys of stored blocks: sha256 over canonical CBOR of everything that a block's KV depends on.

Keys form a chain: each includes the key of the block before it, so equal keys mean equal prefixes from the first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import cbor2

if TYPE_CHECKING:
    import numpy as np

KEY_BYTES = 32
FORMAT_VERSION = 4
"""Raised when the layout of a block's bytes changes, or what is stored under a key: blocks stored by older versions are
then never found. 2: dense keys have dense blocks only; every tensor, and all that the forward depends on, is in them.
3: a layer's keys, then its values; before, each token's value followed its key. 4: sizes of tensor and pipeline
parallelism; a worker's part of a block is in the key of its record (`store/shards.py`).
"""

_MOST_NESTED = 8
_UINT32_LE = 70  # tag of a typed array, RFC 8746: seven times faster than a list of integers


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that the KV of every block of an engine depends on, except tokens and the request's own extra keys.

    revision: identifies the weights, such as a commit or a digest; two revisions must differ here. dtype: dtype of
        activations; kv_dtype: dtype of the KV cache. block_size: tokens. layers, kv_heads: counts of the first worker.
        head_sizes: of key and value.
    tp_size, pp_size: how many workers share a block. sparse_policy: method and options if these change what prompts
    compute, "" for dense. layout: order of axes in the stored bytes.
    """

    model: str
    revision: str
    dtype: str
    kv_dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_sizes: tuple[int, ...]
    tp_size: int = 1
    pp_size: int = 1
    sparse_policy: str = ""
    layout: str = ""
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """Returns 32 bytes, equal for equal namespaces only. Raises ValueError for a field that is not plain data."""
        return digest_of(["gaudi-ucm namespace", asdict(self)])


def digest_of(value: Any) -> bytes:
    """Returns 32 bytes, equal for equal values only. Raises ValueError unless the value is plain data."""
    return hashlib.sha256(_encode(value)).digest()


def chain_keys(
    namespace_digest: bytes,
    parent: bytes | None,
    token_ids: Sequence[int] | np.ndarray,
    block_size: int,
    extra_keys: Sequence[Sequence[Any] | None] | None = None,
) -> list[bytes]:
    """Returns the keys of the full blocks of `token_ids`, 32 bytes each; tokens after the last full block have none.

    Args:
        namespace_digest: `Namespace.digest()`, 32 bytes.
        parent: key of the block before the first token, None if that begins the sequence. To continue a sequence, pass
            its last key, and only the tokens after that block.
        token_ids: ids from 0 to 2^32 - 1.
        extra_keys: one entry per full block with everything else that its KV depends on (LoRA, images, cache_salt), as
            vLLM's `generate_block_hash_extra_keys` gives it; None: no block has any.

    Raises:
        ValueError: an argument of the wrong size, a token id out of range, or an extra key that is not plain data
            (text, bytes, numbers, booleans, None, and sequences of these): such a block cannot be stored.
    """
    _check_key("namespace_digest", namespace_digest)
    if parent is not None:
        _check_key("parent", parent)
    if block_size < 1:
        raise ValueError(f"block_size: found {block_size}, expected at least 1")
    blocks = len(token_ids) // block_size
    extras = [None] * blocks if extra_keys is None else extra_keys
    if len(extras) != blocks:
        raise ValueError(f"extra_keys: found {len(extras)} entries, expected one for each of {blocks} full blocks")
    tokens = _token_bytes(token_ids, blocks * block_size)
    keys = []
    for block, extra in enumerate(extras):
        plain = _plain(extra) if extra else None  # vLLM passes None for none
        start = 4 * block * block_size
        typed = cbor2.CBORTag(_UINT32_LE, tokens[start : start + 4 * block_size])
        parent = digest_of([namespace_digest, parent, typed, plain])
        keys.append(parent)
    return keys


def _token_bytes(token_ids: Sequence[int] | np.ndarray, count: int) -> bytes:
    """Returns the first `count` ids as little-endian uint32."""
    try:
        import numpy as np  # late: configurations read this room without it

        ids = np.asarray(token_ids[:count] if count else [], dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"token_ids: expected 0 to {(1 << 32) - 1} ({error})") from error
    if count and (ids.min() < 0 or ids.max() >= 1 << 32):
        raise ValueError(f"token_ids: found {ids.min()} to {ids.max()}, expected 0 to {(1 << 32) - 1}")
    return ids.astype("<u4").tobytes()


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns `value` if it is plain data. CBOR could encode more, but not always in a unique way."""
    if depth > _MOST_NESTED:
        raise ValueError(f"extra key nested too deeply: expected {_MOST_NESTED} sequences in each other at most")
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise ValueError(f"extra key of type {type(value).__name__}: expected text, bytes, numbers, or sequences of these")


def _encode(value: Any) -> bytes:
    try:
        return cbor2.dumps(value, canonical=True)
    except (cbor2.CBORError, UnicodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a key cannot be made of this: {type(error).__name__}: {error}") from error


def _check_key(name: str, key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"{name}: found {found}, expected {KEY_BYTES} bytes")
