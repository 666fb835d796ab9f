"""What travels with the scheduler's output survives every way it can take."""

import copy

import msgspec
import pytest

from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode, SparseMeta

META = SparseMeta(
    {
        "chatcmpl-äß/1": RequestSelection(SelectionMode.SELECT, 1, 20, 4),
        "": RequestSelection(SelectionMode.CHECK, 0, 7, 0, 2),
    },
    locks=(5, 3),
)


def test_round_trips() -> None:
    """covers: C22. Ids are any text."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(META), type=SparseMeta) == META
    assert msgspec.json.decode(msgspec.json.encode(META), type=SparseMeta) == META
    assert copy.copy(META) == META  # by the protocol that executors send objects with, `__reduce__`
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(META), type=SparseMeta)
    assert isinstance(decoded.requests[""].mode, SelectionMode)


def test_values_of_the_modes() -> None:
    """The device's tensors hold them."""
    assert [int(mode) for mode in SelectionMode] == [0, 1, 2]
    assert [mode.name for mode in SelectionMode] == ["SELECT", "REUSE", "CHECK"]


@pytest.mark.parametrize("data", [b"[]", b'{"requests": {"a": [7, 0, 0, 0]}}', b'{"requests": {"a": [0, 0]}}'])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=SparseMeta)


def test_metas_do_not_share_requests() -> None:
    SparseMeta().requests["a"] = RequestSelection(SelectionMode.SELECT, 0, 1, 1)
    assert SparseMeta().requests == {}
