"""What the worker's side of a sparse method makes of a step as the scheduler sends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sparse.hook_log import HookLog
from vllm_gaudi_ucm.attention import backend
from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.execution.attention_group import step_metadata
from vllm_gaudi_ucm.kv_cache.pair import KvPair
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, UniquePart
from vllm_gaudi_ucm.protocol.attachments import attach_sparse_meta
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode, SparseMeta
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.selection import sparse_worker
from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer
from vllm_gaudi_ucm.sparse.selection.layer_selector import ChoosingLayer
from vllm_gaudi_ucm.sparse.selection.selection_state import ChoiceSlots
from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection, LayerPlace, ServerSizes, SparseWorker

BLOCK_SIZE = 4
PADDING = -1


def worker(remainder_rows: int = 0) -> SparseWorker:
    method = UcmSparseFactory.create_sparse_method("GSA", UcmSparseRole.WORKER, {})
    keys = torch.zeros(16, BLOCK_SIZE, 1, 8)
    sizes = ServerSizes(
        max_model_len=64, max_num_seqs=2, max_rows=4, block_size=BLOCK_SIZE, num_blocks=16, static=remainder_rows > 0
    )._replace(remainder_rows=remainder_rows)
    assert isinstance(method, BlockSparse)
    return SparseWorker(method, BlockSelection.from_layers(method, [SelectionLayer(keys, 1.0)], sizes))


@pytest.mark.parametrize(
    ("place", "leaders"),
    [
        (LayerPlace(0, 8), [0, None, None, 3]),
        (LayerPlace(3, 8), [0, 0, 0, None]),
        # of layers 3 to 5, which share a choice, 3 is on the stage before
        (LayerPlace(4, 8), [0, 0, None, 3]),
    ],
)
def test_stages_count_layers_in_the_model(place: LayerPlace, leaders: list[int | None]) -> None:
    """covers: C17. Which of a stage's four layers chooses for each; None: it is dense."""
    options = {"reuse_layers": 3, "dense_layers": [1, 2, 6]}
    method = UcmSparseFactory.create_sparse_method("GSA", UcmSparseRole.WORKER, options)
    assert isinstance(method, BlockSparse)
    layers = [SelectionLayer(torch.zeros(16, BLOCK_SIZE, 1, 8), 1.0)] * 4
    sizes = ServerSizes(max_model_len=64, max_num_seqs=2, max_rows=4, block_size=BLOCK_SIZE, num_blocks=16, static=True)
    selector = BlockSelection.from_layers(method, layers, sizes, place=place).selector
    assert selector.leaders == leaders
    numbers = [layer._layer_idx for layer in selector.layers if isinstance(layer, ChoosingLayer)]
    assert numbers == [place.first + index for index, leader in enumerate(leaders) if leader == index]
    with pytest.raises(ValueError, match=r"dense_layers has \[6\], expected indices below 6"):
        BlockSelection.from_layers(method, layers, sizes, place=LayerPlace(2, 6))


def test_narrow_summaries_need_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    method = UcmSparseFactory.create_sparse_method("ESA", UcmSparseRole.WORKER, {"summary_dtype": "fp8"})
    assert isinstance(method, BlockSparse)
    layers = [SelectionLayer(torch.zeros(16, BLOCK_SIZE, 1, 8, dtype=torch.bfloat16), 1.0)]
    sizes = ServerSizes(max_model_len=64, max_num_seqs=2, max_rows=4, block_size=BLOCK_SIZE, num_blocks=16, static=True)
    assert BlockSelection.from_layers(method, layers, sizes).selector.summaries[0].dtype == torch.float8_e4m3fn
    monkeypatch.setattr(sparse_worker, "has_e4m3", lambda device: False)
    with pytest.raises(ValueError, match="summary_dtype is 'fp8', expected 'auto' on this GPU"):
        BlockSelection.from_layers(method, layers, sizes)


def test_layers_between_windows_are_counted_alone() -> None:
    """Layers 2, 5, 8 and 11 of 12 see whole contexts: choices are shared among these, and dense layers have numbers of
    the model."""
    method = UcmSparseFactory.create_sparse_method(
        "GSA", UcmSparseRole.WORKER, {"reuse_layers": 2, "dense_layers": [0, 5]}
    )
    assert isinstance(method, BlockSparse)
    layers = [SelectionLayer(torch.zeros(16, BLOCK_SIZE, 1, 8), 1.0)] * 4
    sizes = ServerSizes(max_model_len=64, max_num_seqs=2, max_rows=4, block_size=BLOCK_SIZE, num_blocks=16, static=True)
    selector = BlockSelection.from_layers(method, layers, sizes, place=LayerPlace(0, 12, (2, 5, 8, 11))).selector
    assert selector.leaders == [0, None, 2, 2]
    assert [layer._layer_idx for layer in selector.layers if isinstance(layer, ChoosingLayer)] == [2, 8]


def test_slots_do_not_depend_on_the_order_in_which_requests_are_forgotten() -> None:
    """Each worker has its own order of a set, and all of them compare what they choose."""
    found = []
    for forgotten in (["a", "c", "unknown"], ["unknown", "c", "a"]):
        slots = ChoiceSlots(4, 8)
        for request_id in "abc":
            slots.slot(request_id, ())
        slots.forget(forgotten)
        slots.check_integrity()
        found.append([slots.slot(request_id, ()) for request_id in "bdef"])
    assert found[0] == found[1]


def summarised(computed: int, drafts: list[int]) -> list[int]:
    """Blocks, of 1, 2, 3 ..., that a verification of these drafts, as the scheduler pads them, finds full."""
    output: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": drafts}, num_scheduled_tokens={"a": 1 + len(drafts)}
    )
    step_drafts = StepDrafts.from_scheduler_output(output)
    new = step_drafts.num_scheduled["a"]
    batch = BatchInput(
        *(np.array([count], np.int32) for count in (computed, new, computed + new)),
        (np.arange(1, 9, dtype=np.int32)[None],),
    )
    requests: Any = [SimpleNamespace(request_id="a")]
    found = worker().step(output, step_drafts, requests, batch)
    return sorted(found.summary_blocks.tolist())


def test_layers_of_a_dense_step_without_full_blocks_are_those_of_a_dense_server() -> None:
    """They ask nobody, so that a CPU replays the step as it does there. A method with hooks of its own is asked."""

    def metadata(sparse: SparseWorker, summary_blocks: torch.Tensor | None) -> Any:
        rows = torch.zeros(1, dtype=torch.int64)
        part = UniquePart(rows + 1, rows, rows.int(), rows.int() + 1, 1)
        return step_metadata(rows, AttentionParts(unique=part), BLOCK_SIZE, "reference", sparse, summary_blocks)

    sparse = worker()
    assert metadata(sparse, None).sparse is None
    assert metadata(sparse, torch.ones(1, dtype=torch.int64)).sparse is sparse.method
    kvstar = UcmSparseFactory.create_sparse_method("KVStar", UcmSparseRole.WORKER, {})
    assert metadata(SparseWorker(kvstar), None).sparse is None
    watching = SparseWorker(HookLog(UcmSparseRole.WORKER))
    assert metadata(watching, None).sparse is watching.method


@pytest.mark.parametrize(
    ("computed", "drafts", "full"),
    [
        # the 16th token is certain, and completes the fourth block
        (15, [PADDING, PADDING], [1, 2, 3, 4]),
        (15, [PADDING], [1, 2, 3, 4]),
        # tokens 15 and 16 are drafts, the 14th is certain
        (13, [7, 7, PADDING], [1, 2, 3]),
        (13, [7, 7], [1, 2, 3]),
        # one draft begins the fifth block
        (15, [7, PADDING, PADDING], [1, 2, 3, 4]),
        # a draft would complete the fourth block
        (14, [7], [1, 2, 3]),
    ],
)
def test_drafts_of_padding_are_none(computed: int, drafts: list[int], full: list[int]) -> None:
    """The scheduler fills up a new decode's drafts with -1: rows that do not exist must not make certain tokens
    uncertain, which would leave full blocks without a summary. covers: C11 C16"""
    assert summarised(computed, drafts) == full


@pytest.mark.parametrize(("remainder_rows", "remainders"), [(BLOCK_SIZE * 2, [1, 4]), (0, [])])
def test_tails_are_sparse_and_have_more_rows_than_a_verification(remainder_rows: int, remainders: list[int]) -> None:
    """Not dense prompts, decodes, or verifications."""
    new = np.array([1, 8, 8, 4, 5], np.int32)
    batch = BatchInput(new, new, new, (np.zeros((5, 4), np.int32),))
    requests: Any = [SimpleNamespace(request_id=name) for name in "abcde"]
    chosen = RequestSelection(SelectionMode.SELECT, 1, 3, 1)
    output: Any = SimpleNamespace()
    assert worker(remainder_rows).remainders(output, requests, batch).tolist() == []
    attach_sparse_meta(output, SparseMeta(dict.fromkeys("abde", chosen)))
    assert worker(remainder_rows).remainders(output, requests, batch).tolist() == remainders


def test_a_layer_chooses_before_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors pass through the hooks: which blocks a layer attends to is in the metadata."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(backend, "unified_attention", lambda *arguments, out, **others: out)
    selector: Any = SimpleNamespace(attention_begin=lambda *arguments: calls.append(arguments))
    method = UcmSparseFactory.create_sparse_method("GSA", UcmSparseRole.WORKER, {})
    layer, nothing = backend.UnifiedAttentionImpl(1, 8, 1.0), torch.zeros(1, 1, 8)
    none: Any = None
    parts: Any = SimpleNamespace(block_size=BLOCK_SIZE)
    metadata = backend.UnifiedAttentionMetadata(torch.zeros(1, dtype=torch.int64), parts, method)
    layer.be_sparse(0, selector)
    cache = KvPair(torch.ones(2 * BLOCK_SIZE, 1, 8), torch.ones(2 * BLOCK_SIZE, 1, 8))
    output = torch.ones(1, 1, 8)
    assert layer.forward(none, nothing, nothing, nothing, cache, metadata, output) is output
    ((query, keys, seen),) = calls
    assert (query is nothing, seen is metadata) == (True, True)
    # with the key of the step
    assert keys.shape == (2, BLOCK_SIZE, 1, 8)
    assert keys.sum() == cache.key.sum() == 8 * (2 * BLOCK_SIZE - 1)
