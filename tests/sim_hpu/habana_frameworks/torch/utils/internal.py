"""`is_lazy`: the execution mode, lazy unless the environment says otherwise."""

import os


def is_lazy() -> bool:
    """Whether operations accumulate into a graph (PT_HPU_LAZY_MODE other than "0") instead of running eagerly."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"
