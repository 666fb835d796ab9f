"""A count on a command line: argparse refuses values below one, and shows them."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}, expected a number >= 1")
    return value
