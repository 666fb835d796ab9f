"""What a request may say about sparse methods."""

from typing import Any

import pytest

from vllm_gaudi_ucm.sparse.options import read_extra_args


@pytest.mark.parametrize(
    ("extra_args", "may_be_sparse"),
    [
        (None, True),
        ({}, True),
        ({"ucm_sparse": True}, True),
        ({"ucm_sparse": False}, False),
        # as JSON's true and false reach the engine through the server
        ({"ucm_sparse": 1}, True),
        ({"ucm_sparse": 0}, False),
        ({"kv_transfer_params": {}, "anything": 3}, True),
    ],
)
def test_switch(extra_args: dict[str, Any] | None, may_be_sparse: bool) -> None:
    assert read_extra_args(extra_args) is may_be_sparse


@pytest.mark.parametrize("value", [2, -1, 0.5, "false", None, []])
def test_value_that_is_no_switch(value: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_args\['ucm_sparse'\]: found .*, expected true or false"):
        read_extra_args({"ucm_sparse": value})


def test_unknown_key_with_our_prefix() -> None:
    with pytest.raises(ValueError, match=r"extra_args\['ucm_spars'\]: found an unknown key, expected 'ucm_sparse'"):
        read_extra_args({"ucm_spars": False})
