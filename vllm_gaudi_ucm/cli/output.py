"""Output of commands: the console for lists with sentences, and the check of a file's place before the work."""

import os
import stat
from pathlib import Path

from rich.console import Console

from vllm_gaudi_ucm.printable import print_look_alikes

# columns that are read with ease: prose is broken there on wider terminals
PROSE_WIDTH = 100


def prose_console() -> Console:
    """Returns the console for lists with sentences: as wide as the terminal, up to `PROSE_WIDTH`; 80 without one."""
    print_look_alikes()
    console = Console(markup=False, highlight=False)
    console.width = min(console.width, PROSE_WIDTH)
    return console


def why_not_writable(path: Path) -> str:
    """Returns why no file can be written at a path; "" if one can, as far as the system tells without trying."""
    folder = path.parent
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return f"{folder} is a file"
        if path.is_dir():
            return "is a folder"
        if not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} may not be written by this user"
        if path.exists() and not os.access(path, os.W_OK):
            return "may not be written by this user"
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return f"the folder {folder} does not exist" if missing else f"{error.strerror or error}"
    return ""
