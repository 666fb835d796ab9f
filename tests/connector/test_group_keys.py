"""Keys of a block in each KV-cache group, and what becomes of a load that lacks one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_gaudi_ucm.connector.group_keys import GroupBlock, GroupKeys
from vllm_gaudi_ucm.connector.metadata import BlockLoad
from vllm_gaudi_ucm.connector.request_state import RequestState

KEYS = [bytes([number]) * 32 for number in range(3)]


def test_one_group_has_the_keys_of_its_blocks() -> None:
    groups = GroupKeys([None], 4)
    assert groups.keys_of(KEYS) == KEYS
    # 0: a block that memory mode has taken, or that is before a window
    assert groups.on_device(KEYS[1:], [[7, 0, 9]], 1) == [GroupBlock(KEYS[2], 9)]


def test_each_group_has_a_key_of_its_own() -> None:
    groups = GroupKeys([None, 6, 6], 4)
    keys = groups.keys_of(KEYS)
    assert len(set(keys)) == 9
    assert keys[::3] == KEYS
    assert groups.keys_of(KEYS[1:]) == keys[3:]
    assert GroupKeys([None, 6], 4).keys_of(KEYS)[1] == keys[1]


def test_a_window_has_its_last_blocks() -> None:
    groups = GroupKeys([None, 6], 4)
    keys = groups.keys_of(KEYS)
    found = groups.on_device(keys[2:], [[1, 2, 3, 4], [0, 0, 5, 6]], 1)
    assert found == [GroupBlock(keys[2], 2), GroupBlock(keys[4], 3), GroupBlock(keys[5], 5)]


def test_blocks_of_use_to_the_next_token() -> None:
    """Behind three blocks of four tokens, in a window of six: the last two blocks, as its first token is the eighth."""
    groups = GroupKeys([None, 6], 4)
    keys = groups.keys_of(KEYS)
    assert groups.seen(keys, 3) == [keys[0], keys[2], keys[3], keys[4], keys[5]]
    assert groups.seen(keys[4:], 3) == keys[4:]
    assert groups.seen(keys[:2], 1) == keys[:2]
    assert GroupKeys([None], 4).seen(KEYS, 3) == KEYS


def test_a_load_that_fails_twice_is_not_tried_again() -> None:
    """The first time a part may have been left out, or another server may have removed it meanwhile."""
    request: Any = SimpleNamespace(request_id="a")
    keys: Any = SimpleNamespace()
    state = RequestState(request, keys, is_dense=False)
    for closed in (False, True):
        state.begin_load(BlockLoad("a", [], [], is_partial=True))
        state.begin_anew()
        assert state.is_closed == closed
