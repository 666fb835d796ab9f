"""Makes this interpreter's environment find the packages of another one behind its own.

usage: python scripts/borrow_packages.py OTHER_VENV [PACKAGE_TO_HIDE ...]

A package that both have, such as torch, is this environment's; the other's editable installs and entry points work.
Hidden packages count as not installed: the other environment has releases that fit only its torch.
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
    lines = [f"import site; site.addsitedir({str(borrowed)!r})"]
    # Python takes None here for a module that it did not find
    lines += [f"import sys; sys.modules.setdefault({package!r}, None)" for package in sys.argv[2:]]
    (own / NAME).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
