"""The connector's options: strict, and documented as they are."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions, complete_transfer_config
from vllm_gaudi_ucm.options.errors import UcmConfigError

MEMORY = {"store": {"kind": "memory"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "kv_connector_extra_config.store"),
        ({"store": {"kind": "disk"}}, "store.kind: found 'disk'"),
        ({"store": {"kind": "file"}}, "kv_connector_extra_config.store.path"),
        ({**MEMORY, "load_deadlin": 3}, "load_deadline"),
        ({**MEMORY, "load_deadline": 0}, "load_deadline: found 0"),
        ({**MEMORY, "save": "yes"}, "save: found 'yes'"),
        ({**MEMORY, "load_failure": "ignore"}, '"recompute"'),
        ({**MEMORY, "prefetch": {"prefetch_workers": 0}}, "prefetch.prefetch_workers"),
        ({**MEMORY, "save_queue": 0}, "save_queue: found 0"),
        ({**MEMORY, "save_patience": -1}, "save_patience: found -1"),
        ({**MEMORY, "min_hit_blocks": 1.5}, "min_hit_blocks"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, Any], message: str) -> None:
    """covers: C4 C19"""
    with pytest.raises(UcmConfigError, match=re.escape(message)):
        ConnectorOptions.resolve(given, EXTRA_CONFIG)


def test_saves_are_patient_where_they_take_time_from_steps() -> None:
    auto = ConnectorOptions.resolve(MEMORY, EXTRA_CONFIG)
    assert (auto.patience("cpu"), auto.patience("cuda"), auto.patience("hpu")) == (1, 0, 0)
    given = ConnectorOptions.resolve({**MEMORY, "save_patience": 3}, EXTRA_CONFIG)
    assert (given.patience("cpu"), given.patience("hpu")) == (3, 3)


def config(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


def complete(transfer: KVTransferConfig | None, offloading: float | None = None) -> KVTransferConfig | None:
    engine: Any = SimpleNamespace(
        kv_transfer_config=transfer, cache_config=SimpleNamespace(kv_offloading_size=offloading)
    )
    complete_transfer_config(engine)
    found: KVTransferConfig | None = engine.kv_transfer_config
    return found


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_policy_of_failed_loads_is_ours(policy: str) -> None:
    ours = config("UcmConnector", **MEMORY, load_failure=policy)
    complete(ours)
    assert ours.kv_load_failure_policy == policy
    other = config("ExampleConnector")
    complete(other)
    assert other.kv_load_failure_policy == "fail"


def test_bad_options_are_found_before_the_engine_starts() -> None:
    with pytest.raises(UcmConfigError, match="store"):
        complete(config("UcmConnector"))


def test_the_offloading_connector_gets_our_copies() -> None:
    ours, theirs = config("OffloadingConnector"), config("OffloadingConnector", spec_name="Mine")
    for one in (ours, theirs):
        complete(one)
        complete(one)
    assert ours.kv_connector_module_path == theirs.kv_connector_module_path == OFFLOADING
    assert ours.kv_connector_extra_config["spec_name"] == "UcmOffloadingSpec"
    assert theirs.kv_connector_extra_config == {"spec_name": "Mine"}
    # --kv-offloading-size, for which vLLM names the connector later
    asked = complete(None, offloading=4.0)
    assert asked is not None
    assert asked.kv_connector_extra_config["spec_name"] == "UcmOffloadingSpec"
    assert asked.kv_connector_module_path == OFFLOADING
    assert complete(None) is None


OFFLOADING = "vllm_gaudi_ucm.connector.offloading_connector"


def multi(*children: dict[str, Any]) -> KVTransferConfig:
    return config("MultiConnector", connectors=list(children))


OURS = {"kv_connector": "UcmConnector", "kv_role": "kv_both", "kv_connector_extra_config": MEMORY}


@pytest.mark.parametrize("nested", [False, True])
def test_children_get_what_they_get_alone(nested: bool) -> None:
    """The policy is the engine's: vLLM asks the outermost configuration for it."""
    theirs: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [theirs, OURS]}}
    outer = multi(inner) if nested else multi(theirs, OURS)
    for _ in range(2):
        complete(outer)
    assert outer.kv_load_failure_policy == "recompute"
    assert theirs["kv_connector_extra_config"]["spec_name"] == "UcmOffloadingSpec"
    assert theirs["kv_connector_module_path"] == OFFLOADING
    example = multi({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    complete(example)
    assert example.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (multi(OURS, OURS), "connectors: found UcmConnector 2 times, expected once"),
        (multi(), "kv_connector_extra_config.connectors: found [], expected a list"),
        (config("MultiConnector"), "kv_connector_extra_config.connectors: found None, expected a list"),
        (multi({"kv_role": "kv_both"}), "connectors[0]: found {'kv_role': 'kv_both'}, expected a mapping with"),
        (
            multi({**OURS, "kv_connector_extra_config": {**MEMORY, "load_deadline": 0}}),
            "kv_connector_extra_config.connectors[0].kv_connector_extra_config.load_deadline: found 0",
        ),
    ],
)
def test_children_that_cannot_be_used_are_named(transfer: KVTransferConfig, message: str) -> None:
    with pytest.raises(UcmConfigError, match=re.escape(message)):
        complete(transfer)
