"""When the next step is planned while one runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.platform.features import NGRAM, save_config, start
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.platform import asynchronous
from vllm_gaudi_ucm.platform.asynchronous import SYNCHRONOUS, reasons
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.late_decisions import decides_late
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS

GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {}}}
OTHERS_ON_A_GPU = "another KV connector than ours on a GPU"
# of an engine on a CPU that is asked to be asynchronous
SYNCHRONOUS_OPTIONS: dict[str, dict[str, Any]] = {
    "a CPU": {"ucm": {"scheduler": {}}},
    "ucm.scheduler.async_scheduling false": {"ucm": {"scheduler": {"async_scheduling": False}}},
    "stages of a pipeline": {"pipeline_parallel_size": 2},
    "several workers of several engines": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "another executor than `uni` and `mp`": {"distributed_executor_backend": "external_launcher"},
    "drafts by n-grams": {"speculative_config": NGRAM},
    "drafts with a sparse method that does not decide by counts": {
        "ucm": {"ucm_sparse_method": "HookLog", "scheduler": {"async_scheduling": True}},
        "drafts": True,
    },
    "ucm.memory_mode": {"ucm": {**GSA, "memory_mode": {"enabled": True}}},
    "a model that pools": {"runner": "pooling"},
    "a scheduler of your own": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """A method of the bare interface."""
    with SPARSE_METHODS.scope():
        UcmSparseFactory.register_sparse_method("HookLog", "tests.sparse.hook_log", "HookLog")
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


def configured(model: Path, ucm: dict[str, Any] | None = None, drafts: bool = False, **options: Any) -> Any:
    """drafts: of the model itself."""
    ucm = {"scheduler": {"async_scheduling": True}, **(ucm or {})}
    if drafts:
        options["speculative_config"] = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    return start(model, additional_config={"ucm": ucm}, **options)


def test_every_reason_has_an_engine_here() -> None:
    assert set(SYNCHRONOUS_OPTIONS) == {row.what for row in SYNCHRONOUS} - {"a Gaudi card", OTHERS_ON_A_GPU}


def test_the_page_has_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")
    table = page.split("## Asynchronous scheduling")[1].split("|---|---|\n")[1]
    assert table.splitlines() == [f"| {row.what} | {row.why} |" for row in SYNCHRONOUS]


@pytest.mark.parametrize("what", SYNCHRONOUS_OPTIONS)
def test_what_keeps_an_engine_synchronous(llama: Path, what: str) -> None:
    config = configured(llama, **SYNCHRONOUS_OPTIONS[what])
    assert not config.scheduler_config.async_scheduling
    found = reasons(config, resolve_config(config.additional_config), "cpu")
    assert what in [row.what for row in found]
    assert len(found) == 1


def test_the_default_is_asynchronous_on_a_gpu(llama: Path) -> None:
    config = start(llama)
    assert not config.scheduler_config.async_scheduling
    ucm = resolve_config(config.additional_config)
    found = {device: [row.what for row in reasons(config, ucm, device)] for device in ("cpu", "cuda", "hpu")}
    assert found == {"cpu": ["a CPU"], "cuda": [], "hpu": ["a Gaudi card"]}


def test_vllm_refuses_its_flag_with_stages_or_steps_follow_each_other(llama: Path) -> None:
    """A version of vLLM that takes the flag leaves the decision to the plugin."""
    try:
        config = configured(llama, async_scheduling=True, pipeline_parallel_size=2)
    except ValueError as error:
        said = str(error)
    else:
        assert not config.scheduler_config.async_scheduling
        said = reasons(config, resolve_config(config.additional_config), "cpu")[0].what
    assert "is not supported by the V1 model runner with pipeline parallelism" in said or said == "stages of a pipeline"


@pytest.mark.parametrize("asked", [None, True, False])
def test_vllms_flag_is_respected(llama: Path, asked: bool | None) -> None:
    config = configured(llama, async_scheduling=asked)
    assert config.scheduler_config.async_scheduling == (asked is not False)
    assert config.max_concurrent_batches == (1 if asked is False else 2)


def test_vllms_flag_alone_leaves_steps_of_a_cpu_apart_and_the_log_says_so(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asynchronous.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", asynchronous.logger.name):
            config = start(llama, async_scheduling=True)
    finally:
        asynchronous.logger.removeHandler(caplog.handler)
    assert not config.scheduler_config.async_scheduling
    assert "Asynchronous scheduling is off: a CPU" in caplog.text
    assert "`ucm.scheduler.async_scheduling` true switches it on" in caplog.text


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}])
def test_worker_processes_are_asynchronous(llama: Path, options: dict[str, Any]) -> None:
    config = configured(llama, **options)
    assert config.scheduler_config.async_scheduling
    assert config.max_concurrent_batches == 2


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}])
def test_drafts_of_a_model_are_asynchronous(llama: Path, options: dict[str, Any]) -> None:
    assert configured(llama, drafts=True, **options).scheduler_config.async_scheduling


KVSTAR = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": {}}}


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
def test_drafts_beside_our_sparse_methods_are_asynchronous(llama: Path, options: dict[str, Any]) -> None:
    config = configured(llama, {**KVSTAR, "scheduler": {"async_scheduling": True}}, drafts=True, **options)
    assert config.scheduler_config.async_scheduling
    assert decides_late(config)


OURS = {
    "kv_connector": "UcmConnector",
    "kv_connector_module_path": "vllm_gaudi_ucm.connector",
    "kv_connector_extra_config": {"store": {"kind": "memory"}},
}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}


@pytest.mark.parametrize("connector", [OURS, OFFLOADING, None], ids=["ours", "offloading", "by size"])
def test_connectors_are_asynchronous_with_our_scheduler(llama: Path, connector: dict[str, Any] | None) -> None:
    """It knows that a step is planned when a load fails."""
    options: dict[str, Any] = {"kv_offloading_size": 1.0}
    if connector is not None:
        options = {"kv_transfer_config": KVTransferConfig(kv_role="kv_both", **connector)}
    config = configured(llama, **options)
    assert config.kv_transfer_config is not None
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == "vllm_gaudi_ucm.scheduler.scheduler.UcmAsyncScheduler"


@pytest.mark.parametrize(
    ("connector", "asked", "expected"),
    [(OURS, "auto", []), (OFFLOADING, "auto", [OTHERS_ON_A_GPU]), (OFFLOADING, True, [])],
    ids=["ours", "another", "another, asked"],
)
def test_other_connectors_on_a_gpu_are_asynchronous_where_asked(
    llama: Path, connector: dict[str, Any], asked: object, expected: list[str]
) -> None:
    transfer = KVTransferConfig(kv_role="kv_both", **connector)
    config = configured(llama, {"scheduler": {"async_scheduling": asked}}, kv_transfer_config=transfer)
    found = reasons(config, resolve_config(config.additional_config), "cuda")
    assert [row.what for row in found] == expected


def test_a_foreign_scheduler_beside_a_connector_is_synchronous(llama: Path) -> None:
    foreign = "vllm.v1.core.sched.scheduler.Scheduler"
    transfer = KVTransferConfig(kv_role="kv_both", **OFFLOADING)
    config = configured(llama, kv_transfer_config=transfer, scheduler_cls=foreign)
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == foreign


def test_what_decides_over_blocks_is_asynchronous(llama: Path) -> None:
    ucm = {
        "scheduler": {"admission": "exact", "async_scheduling": True},
        "kv_cache": {"partial_hits": True, "compaction": True},
        "preemption": {"mode": "auto"},
    }
    config = configured(llama, ucm)
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == "vllm_gaudi_ucm.scheduler.scheduler.UcmAsyncScheduler"


def test_a_sparse_method_has_our_asynchronous_scheduler(llama: Path) -> None:
    """Also where vLLM comes a second time, with a copy."""
    config = configured(llama, GSA)
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == "vllm_gaudi_ucm.scheduler.scheduler.UcmAsyncScheduler"
    config.__post_init__()
    assert config.scheduler_config.async_scheduling
