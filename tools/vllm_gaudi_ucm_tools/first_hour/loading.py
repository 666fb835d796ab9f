"""How a probe loads torch and the bridge, and the exceptions that end it without an error. Does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata

LONGEST_ERROR = 400


class DoesNotApply(Exception):
    """Raised if the question has no meaning on this machine; the text gives the reason."""


class Refused(Exception):
    """Raised if the mode is refused, as it must be here; the text tells what refuses it."""


def is_upstream_torch() -> bool:
    """True if the installed torch is not the vendor's, whose version has the suffix `+git`. Does not import it."""
    return "+git" not in metadata.version("torch")


@contextlib.contextmanager
def loading(mode: str) -> Iterator[None]:
    """A context for loading torch, and the bridge with it. Raises Refused if lazy mode is refused, as it must be.

    torch loads the bridge by itself and hides the bridge's own error as the cause of another; a missing bridge, or one
    that lacks a library, is not a refusal.
    """
    try:
        yield
    except Exception as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        if mode == "lazy" and is_upstream_torch() and not isinstance(reason, ImportError):
            raise Refused(f"{type(reason).__name__}: {' '.join(str(reason).split())[:LONGEST_ERROR]}") from error
        raise
