"""Whether `FusedSDPA` computes probabilities again instead of keeping them, where its caller does not say."""

from collections.abc import Iterator
from contextlib import contextmanager


class _Choice:
    """Of the process."""

    recompute = True


def recompute_sdp_enabled() -> bool:
    return _Choice.recompute


def enable_recompute_sdp(enabled: bool) -> None:
    _Choice.recompute = enabled


@contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[None]:
    """Says so for a while."""
    before = recompute_sdp_enabled()
    enable_recompute_sdp(enable_recompute)
    try:
        yield
    finally:
        enable_recompute_sdp(before)
