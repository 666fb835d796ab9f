"""Tells the weights of two folders apart without reading them whole: KV of other weights must never be used."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES, SAMPLE_BYTES = 16, 64 << 10


def weights_digest(model: str) -> str:
    """Digest of the weight files' names, sizes, beginnings and samples of their content, as hexadecimal digits.

    Empty where `model` is no folder here: then its name and revision say which weights it has. Training changes every
    tensor, which the samples see; a change of a few bytes by hand they may miss.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}\0{size}\0".encode())
        with file.open("rb") as weights:
            for sample in range(SAMPLES):
                weights.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()
