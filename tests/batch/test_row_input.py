"""Inputs that a model reads of each row: the inputs it gets, and the numbers of requests that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from vllm import PoolingParams, SamplingParams

from tests.batch.scheduling import Known, new_request, step_output
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, SteadyPlanner, plan_batch
from vllm_gaudi_ucm.batch.request_table import DraftModelRows, RequestTable
from vllm_gaudi_ucm.batch.row_input import (
    BUILT_IN_INPUTS,
    ROW_INPUTS,
    Positions,
    RowInput,
    TokenIds,
    TokenTypes,
    inputs_of,
)


class Voice(RowInput):
    """A number of each request."""

    name = "voice"

    @classmethod
    def is_read_by(cls, model: object) -> bool:
        return getattr(model, "has_voices", True)

    def add(self, row: int, new: Any) -> None:
        self.kept[row] = new.sampling_params.extra_args["voice"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Forgets at its end what a test registers."""
    with ROW_INPUTS.scope():
        yield


def request(name: str, voice: int, block: int) -> Known:
    return Known(name, [1, 2, 3], blocks=[block], params=SamplingParams(extra_args={"voice": voice}))


def voices(table: RequestTable, scheduled: dict[str, int]) -> list[int]:
    """Returns the voices of the rows of a step."""
    _, batch = table.scheduled(scheduled)
    found: list[int] = table.planned(plan_batch(batch, 4)).inputs["voice"].tolist()
    return found


def test_rows_have_the_numbers_of_their_requests_while_the_table_grows() -> None:
    table = RequestTable(1, 8, 4, inputs=(*BUILT_IN_INPUTS, Voice))
    for number, name in enumerate("abc", 1):
        table.update(step_output({name: 3}, new=[new_request(request(name, 10 * number, number))]))
    # rows of single tokens come first
    assert voices(table, {"b": 2, "a": 1, "c": 3}) == [10, 20, 20, 30, 30, 30]
    table.update(step_output({"d": 3}, new=[new_request(request("d", 40, 4))], finished=["b"]))
    assert voices(table, {"d": 1, "a": 1, "c": 1}) == [40, 10, 30]


def test_a_steady_step_has_the_rows_of_its_batch() -> None:
    """The rest of the plan is the one before, moved by a token."""
    planner, computed, ones = SteadyPlanner(4), np.array([1, 1], np.int32), np.ones(2, np.int32)
    tables = np.array([[1], [2]], np.int32)
    for rows in ([0, 1], [0, 1], [5, 3]):
        plan = planner.plan(BatchInput(computed, ones, computed + 1, (tables,), np.array(rows)))
        assert plan.table_rows.tolist() == rows
        assert plan.positions.tolist() == computed.tolist()
        computed = computed + 1


def test_nothing_of_a_request_reaches_the_next_owner_of_its_row() -> None:
    class Silent(Voice):
        def add(self, row: int, new: Any) -> None:
            if new.sampling_params.extra_args["voice"] > 0:
                super().add(row, new)

    table = RequestTable(1, 8, 4, inputs=(*BUILT_IN_INPUTS, Silent))
    table.update(step_output({"a": 3}, new=[new_request(request("a", 7, 1))]))
    table.update(step_output({"b": 3}, new=[new_request(request("b", -1, 1))], finished=["a"]))
    assert voices(table, {"b": 3}) == [0, 0, 0]


def test_a_draft_model_has_inputs_of_its_own() -> None:
    table = RequestTable(1, 8, 4, inputs=(*BUILT_IN_INPUTS, Voice), draft=DraftModelRows())
    table.update(step_output({"a": 3}, new=[new_request(request("a", 7, 1))]))
    _, batch = table.scheduled({"a": 3})
    plan = plan_batch(batch, 4)
    assert list(table.planned(plan).inputs) == ["token_ids", "positions", "voice"]
    assert list(table.planned_draft(plan).inputs) == ["token_ids", "positions"]


def test_a_model_gets_the_registered_inputs_that_it_reads() -> None:
    class Model:
        def forward(self, input_ids: Any, positions: Any, voice: Any) -> None:
            """Reads all."""

    class Plain:
        has_voices = False

        def forward(self, input_ids: Any, positions: Any) -> None:
            """Reads what all models read."""

    assert inputs_of(cast(Any, Model())) == (TokenIds, Positions)
    ROW_INPUTS.register("voice", Voice)
    assert inputs_of(cast(Any, Model())) == (TokenIds, Positions, Voice)
    assert inputs_of(cast(Any, Plain())) == (TokenIds, Positions)


def test_an_input_that_no_argument_takes_is_refused() -> None:
    class Model:
        def forward(self, input_ids: Any, positions: Any) -> None:
            """Has no argument for it."""

    ROW_INPUTS.register("voice", Voice)
    with pytest.raises(ValueError, match=r"row input 'voice': found no argument voice of Model.forward"):
        inputs_of(cast(Any, Model()))


def test_the_name_of_an_input_is_an_identifier() -> None:
    class Model:
        def forward(self, **rows: Any) -> None:
            """Takes every argument."""

    ROW_INPUTS.register("two words", type("Wrong", (Voice,), {"name": "two words"}))
    with pytest.raises(ValueError, match="found the name 'two words', expected a Python identifier"):
        inputs_of(cast(Any, Model()))


class _Pairs:
    """A model that reads token types."""

    def forward(self, input_ids: Any, positions: Any, token_type_ids: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(None, [0, 0, 0]), (2, [0, 0, 1]), ((1, 2), [0, 1, 0]), ([1, 3], [0, 1, 1])],
    ids=["none", "vLLM 0.32", "vLLM 0.33", "a list"],
)
def test_token_types_of_a_request_that_is_pooled(sent: object, expected: list[int]) -> None:
    assert TokenTypes in inputs_of(cast(Any, _Pairs()))
    table = RequestTable(1, 8, 4, inputs=(*BUILT_IN_INPUTS, TokenTypes))
    extra = None if sent is None else {"compressed_token_type_ids": sent}
    params = PoolingParams(task="classify", extra_kwargs=extra)
    for name in ("a", "b"):
        new = replace(new_request(Known(name, [7, 8, 9], blocks=[1])), sampling_params=None, pooling_params=params)
        # the row of a request that has ended is another one's
        table.update(step_output({name: 3}, [new], finished=["a"] if name == "b" else ()))
        _, batch = table.scheduled({name: 3})
        inputs = table.planned(plan_batch(batch, 4)).inputs
        assert TokenTypes.kwargs(inputs["token_types"].tolist()) == {"token_type_ids": expected}
        table.check_integrity()


def test_an_encoder_has_no_blocks() -> None:
    table = RequestTable(1, 8, 4)
    new = replace(
        new_request(Known("a", [7, 8, 9])), sampling_params=None, pooling_params=PoolingParams(), block_ids=()
    )
    table.update(step_output({"a": 3}, [new]))
    assert table.num_blocks.tolist() == [0]
