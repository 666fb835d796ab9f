"""What is loaded of a stored prompt, and which summaries come with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.connector.scheduler_side import BLOCK, make_request
from vllm_gaudi_ucm.connector.partial_loads import PartialLoads
from vllm_gaudi_ucm.prefetch.plan import AccessHistory

KEYS = [bytes([number]) * 32 for number in range(10)]
SPAN = 4


class Residency:
    """Keeps the first and the last block, and one between them, as long as there are rows."""

    def __init__(self, num_rows: int = 100, max_remainder: int = 1) -> None:
        self.num_rows = num_rows
        self.max_remainder = max_remainder

    def dispensable(self, request_id: str, full: int, missing: Sequence[int]) -> list[int]:
        between = [number for number in missing if 0 < number < full - 1]
        return between[1:][::-1]

    def leave_stored(self, request_id: str, keys: Mapping[int, bytes]) -> dict[int, int]:
        assert all(KEYS[number] == key for number, key in keys.items())
        return {number: 50 + number for number in list(keys)[: self.num_rows]}


def loads_of(history: AccessHistory | None = None, **offload: int) -> PartialLoads:
    order = (history or AccessHistory(100)).order
    return PartialLoads(Residency(**offload), BLOCK, SPAN, lambda keys: order(keys, 0))  # type: ignore[arg-type]


def prompt(count: int, **more: Any) -> Any:
    return make_request("a", count, num_preemptions=0, num_prompt_tokens=count, **more)


def test_only_where_a_sparse_step_has_room_for_what_is_left() -> None:
    loads = loads_of(max_remainder=4)
    whole = loads.record_keys(prompt(10 * BLOCK + 1), KEYS, 0)
    assert whole
    assert loads.record_keys(prompt(10 * BLOCK + 4), KEYS, 0) == whole, "prompts share them whatever their tails"
    assert not loads.record_keys(prompt(10 * BLOCK + 5), KEYS, 0)
    assert loads_of(max_remainder=BLOCK).record_keys(prompt(11 * BLOCK), KEYS, 0) == whole
    assert not loads.record_keys(make_request("a", 10 * BLOCK + 1, num_preemptions=1), KEYS, 0)
    assert not loads.record_keys(prompt(3 * BLOCK + 1), KEYS[:3], 0), "nothing is dispensable"


def test_prompts_share_the_records_of_what_they_have_in_common() -> None:
    loads = loads_of()
    long, short = (loads.record_keys(prompt(n * BLOCK + 1), KEYS[:n], 0) for n in (10, 6))
    assert len(set(long)) == 3
    assert long[0] == short[0]
    assert long[1] != short[1], "it has fewer blocks"
    assert not set(long) & set(KEYS)
    assert loads.record_keys(prompt(10 * BLOCK + 1), KEYS, 5) == long[1:]


def test_history_decides_and_position_where_there_is_none() -> None:
    history = AccessHistory(100)
    records = loads_of().record_keys(prompt(10 * BLOCK + 1), KEYS, 0)
    load = loads_of(history).plan("a", KEYS, 0, range(100, 110), records)
    assert load is not None
    assert load.keys == [KEYS[0], KEYS[8], KEYS[9]], "the newest"
    history.record([KEYS[3]] * 4)
    load = loads_of(history).plan("a", KEYS, 0, range(100, 110), records)
    assert load is not None
    assert (load.keys, load.block_ids) == ([KEYS[0], KEYS[3], KEYS[9]], [100, 103, 109])
    assert load.is_partial
    assert [record.key for record in load.records] == records
    assert [record.rows for record in load.records] == [[-1, 51, 52, -1], [54, 55, 56, 57], [58, -1]]
    assert [record.block_ids for record in load.records] == [[100, 0, 0, 103], [0, 0, 0, 0], [0, 109]]
    waiting = loads_of(history).wanted(prompt(10 * BLOCK + 1), KEYS, 0)
    assert waiting == [*records, *load.keys], "the same is prefetched"


def test_what_the_device_has_is_neither_loaded_nor_left() -> None:
    loads = loads_of()
    records = loads.record_keys(prompt(10 * BLOCK + 1), KEYS, 5)
    load = loads.plan("a", KEYS, 5, range(100, 110), records)
    assert load is not None
    assert load.keys == [KEYS[8], KEYS[9]]
    assert [record.rows for record in load.records] == [[-1, 55, 56, 57], [-1, -1]]
    assert [record.block_ids for record in load.records] == [[0, 0, 0, 0], [108, 109]]


def test_fewer_are_left_where_rows_run_out() -> None:
    request = prompt(10 * BLOCK + 1)
    loads = loads_of(num_rows=2)
    load = loads.plan("a", KEYS, 0, range(100, 110), loads.record_keys(request, KEYS, 0))
    assert load is not None
    assert [KEYS.index(key) for key in load.keys] == [0, 3, 4, 5, 6, 7, 8, 9]
    none = loads_of(num_rows=0)
    assert none.plan("a", KEYS, 0, range(100, 110), none.record_keys(request, KEYS, 0)) is None


def test_records_of_a_prompt() -> None:
    """One that has a block that is away has no summary of it at hand."""
    loads, blocks = loads_of(), [*range(100, 110)]
    request = prompt(10 * BLOCK + 1)
    keys = loads.record_keys(request, KEYS, 0)
    saves = loads.record_saves(request, KEYS, blocks)
    assert [(save.key, save.block_ids) for save in saves] == [
        (keys[0], blocks[:4]),
        (keys[1], blocks[4:8]),
        (keys[2], blocks[8:]),
    ]
    blocks[5] = 0
    assert [save.key for save in loads.record_saves(request, KEYS, blocks)] == [keys[0], keys[2]]
    assert loads.record_saves(prompt(10 * BLOCK + 2), KEYS, blocks) == []
    remainders = loads_of(max_remainder=2)
    assert [save.key for save in remainders.record_saves(prompt(10 * BLOCK + 2), KEYS, blocks)] == [keys[0], keys[2]]
    assert remainders.record_saves(prompt(10 * BLOCK + 3), KEYS, blocks) == []


def test_blocks_that_a_query_asks_for() -> None:
    loads = loads_of()
    load = loads.fetch("a", KEYS, {6: (KEYS[6], 31), 9: (KEYS[9], 32)})
    assert (load.keys, load.block_ids, load.is_partial) == ([KEYS[6], KEYS[9]], [31, 32], True)
    assert [record.block_ids for record in load.records] == [[0, 0, 31, 0], [0, 32]]
    assert {row for record in load.records for row in record.rows} == {-1}
