"""Whether a choice pays where steps are padded: by the buckets of the dense and of the sparse step."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import ModelRunnerOutput

from tests.scheduler.scheduler import scheduler_of
from tests.scheduler.schedulers import request
from tests.sparse.steps import Live, step_of
from vllm_gaudi_ucm.graphs.cost.specs import CHOICES, DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.strategies import build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.protocol.attachments import attach_buckets, buckets_of
from vllm_gaudi_ucm.scheduler.choice_cost import BucketSeconds, register_buckets
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost
from vllm_gaudi_ucm.sparse.methods.gsa import GSA, GsaOptions
from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
from vllm_gaudi_ucm.sparse.step_sizes import StepSizes, step_sizes

BLOCK = 128
OPTIONS = GsaOptions(sparse_ratio=0.1)


@pytest.fixture(scope="module")
def buckets() -> BucketSet:
    """Of a Gaudi 2 with Llama 3.1 8B, 16 requests of up to 32K, as a server chooses them by itself."""
    longest = block_budget(32768, BLOCK, OPTIONS)
    assert longest is not None
    limits = Limits(
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        max_model_len=32768,
        block_size=BLOCK,
        num_blocks=4200,
        contiguous=False,
        max_selected_blocks=16 * longest.num_selected,
    )
    cost, live = CostModel(DEVICES["gaudi2"], LLAMA_8B, BLOCK), OPTIONS.init_window_sz + OPTIONS.local_window_sz + 1
    return build_buckets("padding_aware", BucketRequest(limits, cost, 64, None, None, None, live, 1), {})


def decide(buckets: BucketSet | None, decodes: list[int], chunk: int, options: GsaOptions = OPTIONS) -> bool:
    """Whether a step of decodes, with so many tokens each, and of a prompt's chunk is sparse."""
    choice, block_bytes = CHOICES["gaudi2"], 2 * BLOCK * 8 * 128 * 2
    cost = ChoiceCost(
        32,
        32,
        block_bytes,
        block_bytes / 16,
        DEVICES["gaudi2"].bandwidth,
        choice.layer_seconds,
        choice.step_seconds,
    )
    method = GSA(UcmSparseRole.SCHEDULER, options)
    method.register_block_size(BLOCK)
    method.register_choice_cost(cost)
    register_buckets(method, buckets)
    requests: Any = {f"d{i}": Live(f"d{i}", tokens, tokens - 1) for i, tokens in enumerate(decodes)}
    for name in requests:
        method.request_begin(name, [])
    counts = dict.fromkeys(requests, 1)
    if chunk:
        requests["prompt"] = Live("prompt", 2 * chunk)
        counts["prompt"] = chunk
    return bool(method.build_sparse_meta(step_of(counts, requests), requests).requests)


@pytest.mark.parametrize(
    ("decodes", "chunk", "by_sizes", "by_buckets"),
    [
        # without any pad a choice would save 1.5 ms and costs 2.1; the dense bucket is that of 1181 blocks
        ([32000], 0, False, True),
        # saves 6.3 ms without pads; beside a prompt both steps have the same bucket
        ([32000] * 4, 200, True, False),
        ([32000] * 8, 0, True, True),
        ([2100], 1000, False, False),
    ],
)
def test_buckets_decide(buckets: BucketSet, decodes: list[int], chunk: int, by_sizes: bool, by_buckets: bool) -> None:
    assert decide(None, decodes, chunk) is by_sizes
    assert decide(buckets, decodes, chunk) is by_buckets


def test_sizes_decide_where_blocks_decide_over_buckets(buckets: BucketSet) -> None:
    """The unique part as a slice of the cache: how long it is no one knows before the step is planned."""
    limits = replace(buckets.limits, contiguous=True)
    assert not decide(BucketSet(buckets.forward, buckets.logits, limits, buckets.cost), [32000], 0)
    # nor do buckets count what sign codes cost
    assert not decide(buckets, [32000], 0, OPTIONS.model_copy(update={"summary": "codes"}))
    # and where no bucket holds the step
    assert decide(buckets, [32000] * 17, 0)


def test_sizes_of_a_step() -> None:
    """Blocks of 4. A decode of 20 tokens, a verification of three rows behind 16, and a chunk of 8 behind 8."""
    budgets = {
        "decode": block_budget(20, 4, GsaOptions(min_tokens=1, min_blocks=2, local_window_sz=1)),
        "verify": block_budget(17, 4, GsaOptions(min_tokens=1, min_blocks=2, local_window_sz=1)),
    }
    assert all(budgets.values())
    chosen: Any = budgets
    candidates = {name: budget.num_candidates for name, budget in chosen.items()}
    assert candidates == {"decode": 3, "verify": 2}
    requests = {"decode": Live("decode", 20, 19), "verify": Live("verify", 17, 16, [1, 2]), "chunk": Live("c", 30, 8)}
    step = step_of({"decode": 1, "verify": 3, "chunk": 8}, requests)
    dense, sparse = step_sizes(step, chosen, 4)
    assert dense == StepSizes(12, True, 4 + 2, 5)
    selected = sum(budget.num_selected for budget in chosen.values())
    assert sparse == StepSizes(12, True, 4 + 2 - 2, 5 - 3, selected)


def test_a_worker_sends_its_buckets_once(buckets: BucketSet) -> None:
    worker, outputs = SparseWorker(GSA(UcmSparseRole.WORKER, OPTIONS)), [SimpleNamespace() for _ in range(2)]
    worker.send_buckets(buckets)
    for output in outputs:
        worker.attach_report(output)  # type: ignore[arg-type]
    found: Any = [buckets_of(pickle.loads(pickle.dumps(output))) for output in outputs]
    assert found[1] is None
    sizes = StepSizes(3, False, 0, 300, 0)
    assert BucketSeconds(found[0])(sizes) == BucketSeconds(buckets)(sizes)
    assert BucketSeconds(buckets)(sizes._replace(unique=299)) == BucketSeconds(buckets)(sizes)


def test_the_scheduler_takes_them(buckets: BucketSet, tmp_path: Path) -> None:
    options = {"min_tokens": 20, "sparse_steps": "auto"}
    scheduler = scheduler_of(tmp_path, {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}})
    scheduler.add_request(request("a", 60))
    step = scheduler.schedule()
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[1]])
    attach_buckets(output, buckets)
    scheduler.update_from_output(step, output)
    (method,) = (part.method for part in scheduler.parts if part.method is not None)
    assert method.selecting_method._step_seconds is not None
