"""Makes this interpreter's environment find the packages of another one behind its own.

usage: python scripts/borrow_packages.py OTHER_VENV

A package that both have, such as torch, is this environment's; the other's editable installs and entry points work.
"""

import sys
import sysconfig
from pathlib import Path

NAME = "borrowed.pth"


def main() -> None:
    """Writes the file that Python reads when it starts. Exits with an error if the other environment cannot be
    borrowed.
    """
    own = Path(sysconfig.get_path("purelib"))
    other = Path(sys.argv[1]).resolve()
    borrowed = other / own.relative_to(sys.prefix)
    if not borrowed.is_dir():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"error: {other} has no packages for Python {version} ({borrowed} is missing); expected the same Python"
        )
    # not the path alone: `addsitedir` also reads the files of editable installs
    (own / NAME).write_text(f"import site; site.addsitedir({str(borrowed)!r})\n")


if __name__ == "__main__":
    main()
