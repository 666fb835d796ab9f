"""How many layers a block has room for on each stage of a pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.vllm_api.stage_layers import (
    block_layers,
    engine_block_bytes,
    expected_block_layers,
    names_layer_kinds,
)

W, F, C = "sliding_attention", "full_attention", "chunked_attention"


def config(kinds: list[str] | None, *, total: int | None = None, one_table: bool = False, **changes: Any) -> Any:
    """Of an engine with stages, as far as it is read."""
    given: dict[str, Any] = {"stages": 2, "rank": 0, "tp": 1, "shared": 0, **changes}
    values = {"layer_types": kinds, "num_kv_shared_layers": given["shared"]}
    count = len(kinds or ()) if total is None else total
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: values), get_total_num_hidden_layers=lambda: count
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=given["stages"], tensor_parallel_size=given["tp"], rank=given["rank"]
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_table),
    )


@pytest.mark.parametrize(
    ("kinds", "stages", "expected"),
    [
        # a stage has windows alone: groups of one layer
        ([W] * 5 + [F], 2, [1, 1]),
        # groups of three layers
        ([W, F] * 3, 2, [2, 2]),
        ([F, F, W, W, W], 2, [2, 1]),
        ([C, C, C, F] * 2, 2, [1, 1]),
        ([W, W, F, F], 4, [1, 1, 1, 1]),
        ([F] * 5, 2, [3, 2]),
        # one group is padded to the other
        ([W] * 5 + [F] * 4, 3, [3, 2, 3]),
    ],
)
def test_layers_of_the_largest_group_of_a_stage(kinds: list[str], stages: int, expected: list[int]) -> None:
    assert expected_block_layers(config(kinds, stages=stages)) == expected


def test_one_table_has_all_layers_of_a_stage() -> None:
    assert expected_block_layers(config([F, F, W, W, W], one_table=True)) == [3, 2]
    assert block_layers(config([F, F, W, W, W], one_table=True), [3]) == [3, 2]
    # whatever the model says, or does not
    assert block_layers(config(None, total=5), [3]) == [3, 2]
    assert expected_block_layers(config(None, total=5)) == [3, 2]


def test_a_model_that_does_not_say() -> None:
    assert names_layer_kinds(config([W, F]))
    assert not names_layer_kinds(config(None, total=2))
    assert not names_layer_kinds(config([W, F], total=3))
    assert not names_layer_kinds(config([W, F], shared=1)), "a layer without a cache is in no group"


def test_each_worker_checks_its_own_layers() -> None:
    """A model may pay no heed to what it says."""
    kinds = [F, F, W, W, W]
    assert block_layers(config(kinds), [2, 1, 0]) == [2, 1]
    assert block_layers(config(kinds, rank=1), [0, 1, 1]) == [2, 1]
    assert block_layers(config(kinds, tp=2, rank=3), [0, 1, 1]) == [2, 1]
    with pytest.raises(ValueError, match=r"stage 1 has KV-cache groups of \[1, 1\] layers, expected \[0, 1, 1\]"):
        block_layers(config(kinds, rank=1), [1, 1])


def test_bytes_of_a_block_on_all_workers() -> None:
    """A layer takes ten bytes on a worker; two workers share each stage's heads."""
    kinds = [F, F, W, W, W]
    for rank, layers in enumerate([(2, 1, 0), (2, 1, 0), (0, 1, 1), (0, 1, 1)]):
        groups: Any = [SimpleNamespace(layer_names=["layer"] * count) for count in layers]
        found = engine_block_bytes(10 * max(layers), groups, config(kinds, tp=2, rank=rank))
        assert found == 2 * (20 + 10)
    alone: Any = [SimpleNamespace(layer_names=["layer"] * 2)]
    assert engine_block_bytes(20, alone, config(None, stages=1)) == 20
