"""Compares attention of one layer with its peers: `python -m benchmarks.attention [--device cpu|cuda]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__, add_help=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device, rest = parser.parse_known_args(argv)
    # imported late: the one for a GPU needs triton
    if device.device == "cuda":
        from benchmarks.attention_cuda import main as measure
    else:
        from benchmarks.attention_cpu import main as measure
    return measure(rest)


if __name__ == "__main__":
    sys.exit(main())
