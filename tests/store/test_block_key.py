"""Keys: equal exactly where the KV is, over every field, every token and every extra key."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.store.block_key import KEY_BYTES, Namespace, chain_keys

NAMESPACE = Namespace(
    model="llama",
    revision="abc",
    dtype="bfloat16",
    kv_dtype="auto",
    block_size=4,
    layers=2,
    kv_heads=8,
    head_sizes=(64, 64),
)
DIGEST = NAMESPACE.digest()
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=24)
extra = st.one_of(
    st.none(),
    st.lists(st.one_of(st.text(), st.binary(), st.integers(), st.booleans(), st.tuples(st.text(), st.integers()))),
)


def changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else (*value, 1) if isinstance(value, tuple) else value + "x"


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_every_field_is_in_the_key(name: str) -> None:
    """covers: D1, D2, D9. Model, revision, dtypes, sizes, and the sparse policy."""
    other = replace(NAMESPACE, **{name: changed(getattr(NAMESPACE, name))})
    assert other.digest() != DIGEST
    assert other.digest() == replace(other).digest()
    assert chain_keys(other.digest(), None, range(8), 4) != chain_keys(DIGEST, None, range(8), 4)


def test_fields_do_not_run_into_each_other() -> None:
    assert (
        replace(NAMESPACE, model="a", revision="bc").digest() != replace(NAMESPACE, model="ab", revision="c").digest()
    )
    assert replace(NAMESPACE, tp_size=1, pp_size=2).digest() != replace(NAMESPACE, tp_size=2, pp_size=1).digest()


def test_keys_are_the_same_in_every_process_and_version() -> None:
    """A change here means that nothing stored before is found again: raise FORMAT_VERSION with it."""
    keys = chain_keys(DIGEST, None, [1, 2, 3, 4], 4, [[("cache_salt", "x")]])
    assert DIGEST.hex() == "0abad45bafd84a4ab4514ff728d3268d42690f94475a08be4ae683a354271714"
    assert keys[0].hex() == "03248f9fcfc839a0060efecf537612c9446b07e6a776936448379be953538faf"


@pytest.mark.parametrize(
    "before",
    [
        "dd6f1e6996a0d83d30e1245cd98d5faa79b229bd1ff520f75e956e333ed7e181",
        "c1fbda4448d90c837975775767a6670de538a894aa602e9f0122aae4ddb140cd",
    ],
    ids=["format 2", "format 3"],
)
def test_blocks_of_earlier_formats_are_not_found(before: str) -> None:
    """These were the digest of this namespace. In format 2 values lay between their keys: read as blocks of today they
    would be wrong without a word."""
    earlier = bytes.fromhex(before)
    assert earlier not in {replace(NAMESPACE, format_version=version).digest() for version in range(10)}
    assert not set(chain_keys(earlier, None, range(8), 4)) & set(chain_keys(DIGEST, None, range(8), 4))


@given(tokens, st.integers(1, 5))
def test_only_full_blocks_have_keys(ids: list[int], block_size: int) -> None:
    keys = chain_keys(DIGEST, None, ids, block_size)
    assert len(keys) == len(ids) // block_size == len(set(keys))
    assert all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
    assert keys == chain_keys(DIGEST, None, np.asarray(ids, np.int64), block_size)
    assert keys == chain_keys(DIGEST, None, tuple(ids), block_size, [None] * len(keys))


@given(tokens, st.integers(1, 5), st.integers(0, 5), st.data())
def test_going_on_equals_doing_all(ids: list[int], block_size: int, cut: int, data: st.DataObject) -> None:
    extras = [data.draw(extra) for _ in range(len(ids) // block_size)]
    whole = chain_keys(DIGEST, None, ids, block_size, extras)
    cut = min(cut, len(whole))
    first = chain_keys(DIGEST, None, ids[: cut * block_size], block_size, extras[:cut])
    rest = chain_keys(DIGEST, first[-1] if first else None, ids[cut * block_size :], block_size, extras[cut:])
    assert first + rest == whole


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=24), st.data())
def test_a_token_changes_its_block_and_all_after_it(ids: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ids) // 4 * 4 - 1))
    other = list(ids)
    other[place] ^= 1 << data.draw(st.integers(0, 31))
    same = [a == b for a, b in zip(chain_keys(DIGEST, None, ids, 4), chain_keys(DIGEST, None, other, 4), strict=True)]
    assert same == [block < place // 4 for block in range(len(ids) // 4)]


@given(extra, extra)
def test_extra_keys_are_in_the_key(one: Any, two: Any) -> None:
    """covers: D1. LoRA, images, cache_salt: two requests share blocks only if these are equal too."""

    def typed(value: Any) -> Any:  # in Python True == 1 and (1,) != [1]
        return [typed(item) for item in value] if isinstance(value, list | tuple) else (type(value), value)

    keys = [chain_keys(DIGEST, None, range(4), 4, [value]) for value in (one, two)]
    assert (keys[0] == keys[1]) == (typed(one or None) == typed(two or None))


def test_lora_salt_and_images() -> None:
    """covers: D1, D7"""
    values = [None, [("cache_salt", "a")], [("cache_salt", "b")], ["adapter"], ["a1", 0], ["a1", 4], [b"a1", 0]]
    assert len({chain_keys(DIGEST, None, range(4), 4, [value])[0] for value in values}) == len(values)


@pytest.mark.parametrize("bad", [object(), {"a": 1}, {1}, np.zeros(2), "\ud800", [[object()]]])
def test_extra_keys_that_are_no_plain_data_raise_value_error(bad: Any) -> None:
    """covers: D5. A caller catches it and does not store the request."""
    with pytest.raises(ValueError, match=r"extra key of type|a key cannot be made"):
        chain_keys(DIGEST, None, range(4), 4, [[bad]])


def test_extra_keys_that_hold_themselves_raise_value_error() -> None:
    """covers: D5"""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested too deeply"):
        chain_keys(DIGEST, None, range(4), 4, [loop])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"short", None, [1], 1), "namespace_digest: found 5 bytes"),
        ((DIGEST, b"p", [1], 1), "parent: found 1 bytes"),
        ((DIGEST, "p", [1], 1), "parent: found str"),
        ((DIGEST, None, [1], 0), "block_size: found 0"),
        ((DIGEST, None, [-1, 2], 1), "token_ids: found -1 to 2"),
        ((DIGEST, None, [1 << 32], 1), "token_ids: found 4294967296"),
        ((DIGEST, None, [1 << 70], 1), "token_ids"),
        ((DIGEST, None, [1, 2], 1, [None]), "extra_keys: found 1 entries, expected one for each of 2"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_keys(*arguments)
