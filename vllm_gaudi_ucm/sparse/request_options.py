"""What a request may say about sparse methods: `SamplingParams.extra_args = {"ucm_sparse": false}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCH = "ucm_sparse"
_PREFIX = "ucm_"


def read_extra_args(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the request may be sparse, which it may unless it says no; keys without our prefix are not ours.

    Raises ValueError, which the server answers the request with.
    """
    if extra_args is None:
        return True
    for key in extra_args:
        if isinstance(key, str) and key.startswith(_PREFIX) and key != SWITCH:
            raise ValueError(f"extra_args[{key!r}]: found an unknown key, expected {SWITCH!r}; correct or remove it")
    switch = extra_args.get(SWITCH, True)
    # vLLM's server takes JSON's true and false in `vllm_xargs` as 1 and 0
    if not isinstance(switch, int) or switch not in (0, 1):
        raise ValueError(f"extra_args[{SWITCH!r}]: found {switch!r}, expected true or false")
    return bool(switch)
