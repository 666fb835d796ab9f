"""A long real text that is on this machine anyway: prose or licences that came with packages or the system."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Newton's Opticks, test data of a package that vLLM requires: 570 kB of English prose. Then licence collections.
PATTERNS = (
    "tvm_ffi/3rdparty/libbacktrace/*Opticks.txt",
    "torch-*.dist-info/**/LICENSE",
    "numpy-*.dist-info/**/LICENSE*",
)
SYSTEM = (Path("/usr/share/common-licenses/GPL-3"), Path("/usr/share/common-licenses/GPL-2"))
SMALLEST = 32_768


def find_text(smallest: int = SMALLEST) -> Path:
    """The first known file of at least `smallest` bytes; raises FileNotFoundError."""
    packages = Path(sysconfig.get_path("purelib"))
    found = [path for pattern in PATTERNS for path in sorted(packages.glob(pattern))]
    for path in (*found, *SYSTEM):
        if path.is_file() and path.stat().st_size >= smallest:
            return path
    raise FileNotFoundError(f"no text of {smallest} bytes among {packages} and {SYSTEM[0].parent}: name one by --text")


def read_text(path: Path) -> str:
    """Reads the text from a third onwards, after prefaces and tables of contents."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if len(text) < 4 * SMALLEST else text[len(text) // 3 :]
