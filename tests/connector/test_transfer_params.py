"""Requests may name blocks of another engine, but cannot harm other requests."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gaudi_ucm.connector.transfer_params import check_transfer_params

READ: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": ([1, 2],),
    "remote_engine_id": "first",
    "remote_request_id": "1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


@pytest.mark.parametrize(
    "params", [{}, READ, {"do_remote_decode": True, "remote_port": None}, {"of_another": object()}]
)
def test_what_an_engine_answers_is_taken(params: dict[str, Any]) -> None:
    check_transfer_params(params)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"remote_port": "5600"}, "'remote_port'.*found '5600', expected 1 to 65535"),
        ({"remote_port": 0}, "'remote_port' is missing"),
        ({"remote_block_ids": [1, 2]}, "'remote_block_ids'.*expected a list of block numbers"),
        ({"remote_block_ids": [[-1]]}, "'remote_block_ids'.*found"),
        ({"remote_engine_id": None}, "'remote_engine_id' is missing"),
        ({"tp_size": 0}, "'tp_size'.*at least 1"),
        ({"transfer_mode": "push"}, "'transfer_mode'.*expected pull"),
        ({"disagg_spec": {}}, "'disagg_spec'.*use NixlConnector"),
        ({"lmcache.tag.a": {}}, "'lmcache.tag.a'.*expected text"),
    ],
)
def test_what_vllm_would_fail_with_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_transfer_params({**READ, **wrong})
