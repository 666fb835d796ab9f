"""The first line of a server's phase log: from it the tools know the limits that the server had."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.decisions.bucket_choice import server_limits
from vllm_gaudi_ucm.platform import worker as worker_module
from vllm_gaudi_ucm.platform.worker import UcmWorker
from vllm_gaudi_ucm_tools.buckets.cost_options import LIMIT_NAMES, OPTIONAL_LIMITS, limits_of

ENGINE: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
    model_config=SimpleNamespace(max_model_len=256, model="tiny"),
    num_speculative_tokens=0,
)


def header_of(kind: str, **ucm: Any) -> dict[str, Any]:
    worker: Any = SimpleNamespace(
        vllm_config=ENGINE,
        model_config=ENGINE.model_config,
        scheduler_config=ENGINE.scheduler_config,
        cache_config=SimpleNamespace(block_size=16),
        model_runner=SimpleNamespace(kind=kind),
        _ucm=resolve_config({"ucm": ucm}),
        _device=SimpleNamespace(name=lambda: "GAUDI2", kind="cpu"),
    )
    blocks: Any = SimpleNamespace(num_blocks=100, kv_cache_groups=[])
    with pytest.MonkeyPatch.context() as patch:
        # there are no layers
        patch.setattr(worker_module, "kv_groups", lambda *_: (KvGroup(0, 16, None, ("layer",)),))
        return UcmWorker._describe(worker, blocks)


def read_limits(header: dict[str, Any]) -> Any:
    options = argparse.Namespace(
        device="cpu", model=None, **dict.fromkeys((*LIMIT_NAMES, *OPTIONAL_LIMITS, "granularity"))
    )
    return limits_of(options, header, "the log")


@pytest.mark.parametrize("contiguous", ["auto", True, False])
@pytest.mark.parametrize("shared", [None, 20])
def test_a_server_with_static_shapes_has_the_limits_that_its_log_says(contiguous: Any, shared: int | None) -> None:
    header = header_of("hpu_graph", attention={"contiguous_pa": contiguous}, graphs={"max_shared_blocks": shared})
    assert header["graphs"] == "hpu_graph"
    assert read_limits(header) == server_limits(ENGINE, 16, 100, contiguous is True, shared)


@pytest.mark.parametrize("contiguous", ["auto", True, False])
def test_at_true_shapes_a_step_may_have_any_shared_blocks_and_read_a_slice(contiguous: Any) -> None:
    header = header_of("off", attention={"contiguous_pa": contiguous}, graphs={"max_shared_blocks": 20})
    assert (header["contiguous"], header["max_shared_blocks"]) == (contiguous, None)
    limits = read_limits(header)
    assert limits.most_shared_blocks == 99
    assert limits.max_unique_blocks == (99 if contiguous is False else 100)


@pytest.mark.parametrize("kind", ["off", "hpu_graph"])
def test_a_sparse_server_says_how_many_blocks_its_steps_may_choose(kind: str) -> None:
    header = header_of(
        kind,
        ucm_sparse_method="GSA",
        ucm_sparse_config={"GSA": {"min_tokens": 32, "sparse_ratio": 0.5}},
    )
    # of 16 blocks 8, of which 3 are sinks and window; 8 requests
    assert header["max_selected_blocks"] == 8 * 5
    assert read_limits(header).max_selected_blocks == 40


@pytest.mark.parametrize("kind", ["off", "hpu_graph"])
def test_a_server_with_slots_for_tokens_counts_ranges(kind: str) -> None:
    header = header_of(kind, kv_cache={"granularity": "token"})
    assert header["strip"] == 8
    limits = read_limits(header)
    assert limits.blocks_per_request == 256 // 8 + 16
    if kind != "off":
        assert limits == server_limits(ENGINE, 16, 100, False, None, by_token=True)
