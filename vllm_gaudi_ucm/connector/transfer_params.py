"""Checks `kv_transfer_params` of a request, which NIXL's and LMCache's connectors read without a look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_blocks(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(group, list | tuple) and all(map(_is_count, group)) for group in value
    )


def _is_time(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


_TEXT = (lambda value: isinstance(value, str) and bool(value), "text")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_COUNT = (_is_count, "a whole number, not negative")
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_remote_prefill": _FLAG,
    "do_remote_decode": _FLAG,
    "remote_block_ids": (_is_blocks, "a list of block numbers for each KV-cache group"),
    "remote_engine_id": _TEXT,
    "remote_request_id": _TEXT,
    "remote_host": _TEXT,
    "remote_port": (lambda value: _is_count(value) and 0 < value < 65536, "1 to 65535"),
    "tp_size": (lambda value: _is_count(value) and value > 0, "a whole number, at least 1"),
    "dcp_size": (lambda value: value == 1, "1: decode context parallelism is not served here"),
    "pp_size": (lambda value: value == 1, "1: pipeline stages are not served here"),
    "remote_num_tokens": _COUNT,
    "remote_blocks_expiry_time": (_is_time, "a time in seconds"),
    "remote_registration_generation": _COUNT,
    "transfer_mode": (lambda value: value == "pull", "pull: the engine that decodes reads the blocks"),
}
_OF_A_READ = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NOT_SERVED = {
    "disagg_spec": "LMCache's own way between engines; use NixlConnector",
    "ret_first_tok": "LMCache's own way between engines; use NixlConnector",
}
_LMCACHE = "lmcache."


def check_transfer_params(params: Mapping[str, Any]) -> None:
    """Raises ValueError with the parameter, what was found and what was expected. Unknown ones pass: connectors from
    outside have their own. None is like a parameter that is absent.
    """
    missing = [name for name in _OF_A_READ if not params.get(name)]
    if params.get("do_remote_prefill") and missing:
        raise ValueError(
            f"kv_transfer_params['do_remote_prefill']: {missing[0]!r} is missing; send what the first engine answered"
        )
    for name, value in params.items():
        if name in _NOT_SERVED:
            raise ValueError(f"kv_transfer_params[{name!r}] is not supported ({_NOT_SERVED[name]}); remove it")
        if isinstance(name, str) and name.startswith(_LMCACHE):
            # tags become part of a key, which is text
            fits, expected = isinstance(value, str | bool), "text, or true or false"
        elif name in _EXPECTED and value is not None:
            is_right, expected = _EXPECTED[name]
            fits = is_right(value)
        else:
            continue
        if not fits:
            raise ValueError(
                f"kv_transfer_params[{name!r}]: found {value!r:.200}, expected {expected}; send what the first engine "
                "answered"
            )
