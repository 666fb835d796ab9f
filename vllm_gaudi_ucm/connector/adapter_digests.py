"""Digests of adapters (LoRA): the keys of stored blocks tell one adapter from another by its files."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from vllm_gaudi_ucm.connector.forward_inputs import weights_digest

Stamps = tuple[tuple[str, int, int], ...]
"""The name, size and time of each file of an adapter."""


class AdapterDigests:
    """Reads each adapter once, and again if one of its files has changed.

    Names tell nothing across engines, and an adapter may be loaded again with other weights under its name and path.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamps, bytes]] = {}

    def namespace(self, namespace: bytes, path: str) -> bytes:
        """Returns the digest of a namespace with an adapter. path: the folder that a request names.

        An adapter that is not in files here counts by its path. What is stored for one that cannot be loaded is never
        found again: no engine loads the same files.
        """
        try:
            digest = self._digest(path)
        except OSError as error:
            # gone while it was read: the worker will report it
            digest = f"{path}: {error}".encode()
        return sha256(namespace + b"adapter" + digest).digest()

    def _digest(self, path: str) -> bytes:
        folder = Path(path).expanduser()
        stamps = _stamps(folder)
        stamp, digest = self._known.get(path, ((), b""))
        if not digest or stamp != stamps:
            digest = _read(folder) if stamps else path.encode()
            self._known[path] = stamps, digest
        return digest


def _stamps(folder: Path) -> Stamps:
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    found = ((file.name, file.stat()) for file in files if file.is_file())
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _read(folder: Path) -> bytes:
    config = folder / "adapter_config.json"
    described = config.read_bytes() if config.is_file() else b""
    return sha256(described).digest() + weights_digest(str(folder)).encode()
