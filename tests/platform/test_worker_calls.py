"""Every call that vLLM makes to a worker, or lets users make, works or is refused by its name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import vllm
from vllm.config import ParallelConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from tests.platform.features import save_config, start
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.model_calls import ModelCalls
from vllm_gaudi_ucm.platform.refused_calls import REFUSED, UnsupportedCallError
from vllm_gaudi_ucm.platform.reload import refuse_sleep
from vllm_gaudi_ucm.platform.worker import UcmWorker

# vLLM's own implementation, which is right for us
INHERITED = {
    "apply_model",
    "check_health",
    "get_model_inspection",
    "get_supported_kv_cache_layouts",
    "release_late_interaction_query_cache",
    "reset_mm_cache",
    "set_kv_cache_layout",
    "supports_draft_weight_updates",
    "vocab_size",
}
# parts of the GPU worker that nobody calls from outside
OF_GPU_WORKER = {"annotate_profile", "randomize_dummy_inputs", "sleep_mode_backend"}
# calls that vLLM's wrapper of a worker answers, and one that is for Ray's
OF_WRAPPER = {"init_worker", "update_environment_variables", "adjust_rank"}
# calls that one of the supported versions of vLLM does not know: 0.32 the first, 0.33 the second
OF_ONE_VERSION = {"get_simple_cpu_offload_num_cpu_blocks", "reinitialize_distributed"}
ROOMS = ("v1/engine", "v1/executor", "v1/fault_tolerance", "entrypoints", "distributed/elastic_ep", "engine")


def public_names(cls: type) -> Iterator[str]:
    for name, value in inspect.getmembers(cls):
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name


def called_names(file: Path) -> Iterator[str]:
    """The first argument of each `collective_rpc` of a file, where it is a text."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr.startswith("collective_rpc") and isinstance(first, ast.Constant):
                yield first.value


def test_every_call_is_classified() -> None:
    """A new one of vLLM's belongs into the worker, into `REFUSED` or into the lists above."""
    calls = {*public_names(WorkerBase), *public_names(Worker)}
    root = Path(vllm.__file__).parent
    called = {name for room in ROOMS for file in (root / room).rglob("*.py") for name in called_names(file)}
    assert {"sleep", "add_lora", "execute_dummy_batch", "reset_weights"} <= called
    known = {*vars(UcmWorker), *vars(ModelCalls), *REFUSED, *INHERITED, *OF_GPU_WORKER, *OF_WRAPPER}
    assert calls | called <= known, sorted((calls | called) - known)
    assert not REFUSED.keys() & {*vars(UcmWorker), *vars(ModelCalls)}
    assert REFUSED.keys() | INHERITED <= calls | called | OF_ONE_VERSION


@pytest.mark.parametrize("call", sorted(REFUSED))
def test_refused_by_name(call: str) -> None:
    """By the last of several workers: vLLM stops reading answers at the first error, and mixes up later ones."""
    worker = object.__new__(UcmWorker)
    worker.parallel_config, worker.rank = ParallelConfig(tensor_parallel_size=2), 0
    assert getattr(worker, call)(1, option=2) is None
    worker.rank = 1
    with pytest.raises(UnsupportedFeatureError) as raised:
        getattr(worker, call)(1, option=2)
    assert isinstance(raised.value, UnsupportedCallError)
    feature, instead = REFUSED[call]
    assert str(raised.value) == (
        f"vllm-gaudi-ucm does not support {feature} (asked for by the call {call}); {instead}. "
        "docs/support.md lists what is supported."
    )


@pytest.mark.parametrize("slept", [False, True])
def test_a_gpu_sleeps_once_one_has(tmp_path: Path, slept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A18"""
    monkeypatch.setattr("vllm_gaudi_ucm.platform.reload.SLEPT_ON_A_GPU", slept)
    model = save_config(tmp_path, "LlamaForCausalLM", "llama")
    refused = pytest.raises(UnsupportedCallError, match="sleep mode above level 0 with a GPU, whose memory")
    with nullcontext() if slept else refused:
        refuse_sleep(start(model), UcmConfig(), "cuda")
