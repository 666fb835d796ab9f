"""The scheduler's role of GSA and ESA: which requests are sparse, with what budget, in which mode."""

from typing import Any

import pytest

from tests.sparse.steps import BLOCK_SIZE, Live, decode, step_of
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.methods.gsa import ESA, GSA
from vllm_gaudi_ucm.sparse.options import MethodOptions

SELECT, REUSE = SelectionMode.SELECT, SelectionMode.REUSE


def gsa(**options: Any) -> GSA:
    method = GSA(UcmSparseRole.SCHEDULER, {"min_tokens": 20, **options})
    method.register_block_size(BLOCK_SIZE)
    return method


def begin(method: BlockSparse, *requests: Live) -> None:
    for request in requests:
        method.request_begin(request.request_id, [0] * request.num_tokens)


def test_a_decode_gets_its_budget() -> None:
    """10 full blocks and a tail: 4 are attended (min_blocks), of which 1 sink and 2 of the window are live."""
    method, request = gsa(), Live("a", 42)
    begin(method, request)
    assert decode(method, request).requests == {"a": RequestSelection(SELECT, 1, 8, 1)}


def test_requests_that_are_dense() -> None:
    """covers: C24. Short contexts, requests that never began, chunks of prompts, also of one token."""
    method = gsa()
    requests = {
        "short": Live("short", 19),
        "windows": Live("windows", 15),
        "chunk": Live("chunk", 60, computed=30),
        "last token of a prompt": Live("last token of a prompt", 60, computed=59),
        "one token of a prompt": Live("one token of a prompt", 60, computed=30),
        "tiny": Live("tiny", 1),
        "off": Live("off", 60, computed=59),
    }
    begin(method, *(request for name, request in requests.items() if name != "off"))
    counts = {"short": 1, "windows": 1, "chunk": 30, "last token of a prompt": 1, "one token of a prompt": 1}
    requests["short"].computed, requests["windows"].computed = 18, 14
    everything: Any = requests
    meta = method.build_sparse_meta(step_of({**counts, "tiny": 1, "off": 1}, requests), everything)
    assert list(meta.requests) == ["last token of a prompt"]


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_drafts_are_no_context(drafts: int) -> None:
    """A verification is sparse like a decode, with the budget of its certain tokens."""
    method, request = gsa(), Live("a", 40, drafts=[7] * drafts)
    begin(method, request)
    assert decode(method, request).requests == {"a": RequestSelection(SELECT, 1, 8, 1)}


def test_prompt_rows_of_a_context_with_gaps() -> None:
    """Chunks too, with the budget of what they have computed; a request without gaps stays dense beside it."""
    requests: Any = {
        "gaps": Live("gaps", 43, computed=40),
        "chunk": Live("chunk", 52, computed=48),
        "whole": Live("whole", 43, computed=40),
    }
    asked = []

    def has_gaps(request_id: str, num_rows: int) -> bool:
        asked.append((request_id, num_rows))
        return request_id != "whole"

    method = GSA(UcmSparseRole.SCHEDULER, {"min_tokens": 20}, has_gaps)
    method.register_block_size(BLOCK_SIZE)
    begin(method, *requests.values())
    meta = method.build_sparse_meta(step_of({"gaps": 3, "chunk": 2, "whole": 3}, requests), requests)
    assert meta.requests == {"gaps": RequestSelection(SELECT, 1, 8, 1), "chunk": RequestSelection(SELECT, 1, 10, 1)}
    assert asked == [("gaps", 3), ("chunk", 2), ("whole", 3)]


def test_a_token_that_is_not_known_yet_is_context() -> None:
    """Asynchronous scheduling: it will come."""
    method, request = gsa(), Live("a", 39, computed=39)
    begin(method, request)
    requests: Any = {"a": request}
    assert method.build_sparse_meta(step_of({"a": 1}, requests), requests).requests["a"].window_start == 8


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_reuse_steps(steps: int) -> None:
    """covers: C4, C12. A selection serves so many steps, and its windows stay: newer tokens are all live."""
    method, request = gsa(reuse_steps=steps), Live("a", 40)
    begin(method, request)
    metas = [decode(method, request).requests["a"] for _ in range(3 * steps)]
    assert [meta.mode for meta in metas] == ([SELECT] + [REUSE] * (steps - 1)) * 3
    for index, meta in enumerate(metas):
        selected_at = index - index % steps
        assert meta.window_start == (40 + selected_at) // BLOCK_SIZE - 2


@pytest.mark.parametrize("event", ["preempted", "finished and begun", "dense step"])
def test_nothing_is_reused_after_a_break(event: str) -> None:
    """covers: C5. Preemption, another request with the id, and a dense step in between."""
    method, request = gsa(reuse_steps=100), Live("a", 40)
    begin(method, request)
    assert [decode(method, request).requests["a"].mode for _ in range(3)] == [SELECT, REUSE, REUSE]
    requests: Any = {"a": request}
    if event == "preempted":
        method.request_preempted("a")
    elif event == "dense step":
        request.num_tokens += 10
        assert not method.build_sparse_meta(step_of({"a": 5}, requests), requests).requests
    else:
        method.request_finished_in_scheduler("a")
        assert not decode(method, request).requests
        begin(method, request)
    assert [decode(method, request).requests["a"].mode for _ in range(2)] == [SELECT, REUSE]


def test_nothing_stays_of_finished_requests() -> None:
    """covers: C5"""
    method, requests = gsa(), [Live(str(index), 40) for index in range(5)]
    begin(method, *requests)
    decode(method, *requests)
    for request in requests:
        method.request_finished_in_scheduler(request.request_id)
        method.request_finished_in_scheduler(request.request_id)
    method.request_preempted("0")
    assert not method._held


def test_esa_selects_anew_in_every_step_and_layer() -> None:
    method, request = ESA(UcmSparseRole.SCHEDULER, {"min_tokens": 20}), Live("a", 40)
    method.register_block_size(BLOCK_SIZE)
    begin(method, request)
    assert [decode(method, request).requests["a"].mode for _ in range(3)] == [SELECT] * 3
    assert (method.reuse_steps, method.reuse_layers, method.dense_layers) == (1, 1, ())


def test_layers_of_gsa() -> None:
    """covers: C4"""
    method = gsa(reuse_layers=3, dense_layers=[0, 1])
    assert (method.reuse_layers, method.dense_layers) == (3, (0, 1))


def test_missing_block_size() -> None:
    method, request = GSA(UcmSparseRole.SCHEDULER, {"min_tokens": 20}), Live("a", 40)
    begin(method, request)
    with pytest.raises(RuntimeError, match="found no block size, expected register_block_size"):
        decode(method, request)


def test_options_that_name_no_budget() -> None:
    class Bare(BlockSparse):
        Options = MethodOptions

    with pytest.raises(TypeError, match=r"Bare\.Options: found MethodOptions, expected a subclass of BlockOptions"):
        Bare(UcmSparseRole.SCHEDULER)
