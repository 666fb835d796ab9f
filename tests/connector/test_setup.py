"""What keys depend on: engines that differ in anything that changes KV have different namespaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connector.setup import make_setup
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.connector.setup import sparse_policy
from vllm_gaudi_ucm.options.errors import UcmConfigError

GSA = {"ucm_sparse_method": "GSA"}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.bfloat16},
        {"block_size": 32},
        {"heads": 1},
        {"layers": ("0", "1", "2")},
        {"revision": "v2"},
        {"hf": {"rms_norm_eps": 1e-3}},
        {"tp": 2},
        {"pp": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_of_these_changes_the_keys(tmp_path: Path, change: dict[str, Any]) -> None:
    """covers: D1"""
    base, other = make_setup(tmp_path), make_setup(tmp_path, **change)
    assert base.namespace(sparse=False) != other.namespace(sparse=False)


def test_groups_change_the_keys_and_a_block_has_one_groups_layers(tmp_path: Path) -> None:
    """covers: D1. The same layers under one table, and in two groups in either way; the larger group has two layers."""
    one = make_setup(tmp_path, layers=("0", "1", "2"))
    others = [
        make_setup(tmp_path, layers=("0",), window_layers=("1", "2")),
        make_setup(tmp_path, layers=("0", "1"), window_layers=("2",)),
    ]
    assert len({setup.namespace(sparse=False) for setup in (one, *others)}) == 3
    assert [setup.block_bytes * 3 for setup in others] == [one.block_bytes * 2] * 2
    assert [setup.group_keys.count for setup in (one, *others)] == [1, 2, 2]


def test_other_weights_change_the_keys_and_another_place_does_not(tmp_path: Path) -> None:
    """covers: D1"""
    digests = []
    for parent, weights in (("x", b"1"), ("y", b"1"), ("z", b"2")):
        folder = tmp_path / parent / "model"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
        digests.append(make_setup(folder).namespace(sparse=False))
    assert digests[0] == digests[1] != digests[2]


def test_a_sparse_method_counts_for_the_requests_that_it_applies_to(tmp_path: Path) -> None:
    """covers: D2"""
    dense, sparse = make_setup(tmp_path), make_setup(tmp_path, ucm=GSA)
    assert dense.namespace(sparse=True) == dense.namespace(sparse=False) == sparse.namespace(sparse=False)
    assert sparse.namespace(sparse=True) != sparse.namespace(sparse=False)
    policies = {
        sparse_policy(resolve_config({"ucm": {**GSA, "ucm_sparse_config": {"GSA": options}}}))
        for options in ({}, {"sparse_ratio": 0.2}, {"prefetch_workers": 9}, {"min_tokens": 64})
    }
    # how blocks are prefetched changes nothing in them
    assert len(policies) == 3


def test_memory_mode_counts_for_sparse_requests(tmp_path: Path) -> None:
    """covers: D2. Answers do not attend to blocks that are away; where these are changes nothing."""

    def digest(**mode: Any) -> bytes:
        return make_setup(tmp_path, ucm={**GSA, "memory_mode": mode}).namespace(sparse=True)

    on = digest(enabled=True)
    assert len({on, digest(), digest(enabled=True, on_device_ratio=0.7)}) == 3
    assert digest(enabled=True, store={"kind": "memory"}) == on
    assert make_setup(tmp_path, ucm={**GSA, "memory_mode": {"enabled": True}}).namespace(sparse=False) == (
        make_setup(tmp_path).namespace(sparse=False)
    )


def test_bytes_of_a_block(tmp_path: Path) -> None:
    assert make_setup(tmp_path).block_bytes == 2 * (16 * 2 * 16 * 4)


@pytest.mark.parametrize(
    ("role", "save", "loads", "saves"),
    [
        ("kv_both", True, True, True),
        ("kv_both", False, True, False),
        ("kv_consumer", True, True, False),
        ("kv_producer", True, False, True),
    ],
)
def test_role_and_option_say_what_it_does(tmp_path: Path, role: str, save: bool, loads: bool, saves: bool) -> None:
    setup = make_setup(tmp_path, role=role, options={"save": save})
    assert (setup.loads, setup.saves) == (loads, saves)


def test_memory_of_another_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UcmConfigError, match=r"store\.kind.*distributed-executor-backend mp"):
        make_setup(tmp_path, executor="mp")
    make_setup(tmp_path, executor="mp", options={"store": {"kind": "redis"}})
