"""Configuration: every key, every kind of mistake, and files."""

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, describe, markdown_table, resolve_config, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.options.section import Section

SECTIONS = " or ".join(
    f"ucm.{name}"
    for name in (
        "allow_untested_vllm",
        "attention",
        "cpu",
        "distributed",
        "graphs",
        "kv_cache",
        "memory_mode",
        "phase_log",
        "phase_log_generations",
        "phase_log_size",
        "preemption",
        "quantised_experts",
        "scheduler",
        "ucm_sparse_config",
        "ucm_sparse_method",
    )
)

BLOCK_OPTIONS: dict[str, tuple[list[Any], list[Any], str]] = {
    "sparse_ratio": ([0.05, 1.0], [0.0, 1.5, "0.3", True, None], "number, above 0 and at most 1"),
    "local_window_sz": ([1, 4], [0, 1.5, True], "integer, at least 1"),
    "init_window_sz": ([0, 4], [-1, "1", None], "integer, at least 0"),
    "min_blocks": ([1, 64], [0, 4.0], "integer, at least 1"),
    "min_tokens": ([1, 4096], [0, None, "1k"], "integer, at least 1"),
    "prompt_ratio": ([None, 0.2, 1.0], [0.0, 1.5, "0.3"], "number, above 0 and at most 1 or null"),
    "prompt_tile": ([16, 256], [15, None, 32.5], "integer, at least 16"),
    "summary": (
        ["mean", "minmax", "box_mean", "hash", "codes"],
        ["max", "MEAN", None],
        'one of "mean", "minmax", "box_mean", "hash", "codes"',
    ),
    "summary_dtype": (["auto", "fp8"], ["bf16", None, 8], 'one of "auto", "fp8"'),
    "sparse_steps": (["auto", "always"], ["never", None, True], 'one of "auto", "always"'),
    "implementation": (
        ["auto", "reference", "cuda", "cuda_fused", "hpu", "native"],
        ["fused", None, 3],
        'one of "auto", "reference", "cuda", "cuda_fused", "hpu", "native"',
    ),
    "scores_over_ranks": (["all", "per_rank"], ["none", None, True], 'one of "all", "per_rank"'),
}
PREFETCH_OPTIONS: dict[str, tuple[list[Any], list[Any], str]] = {
    "prefetch_workers": ([1, 4, 64], [0, 65, "4", True], "integer, 1 to 64"),
    "max_pending_prefetch": ([1, 64, 65536], [0, 65537, 6.4, None], "integer, 1 to 65536"),
    "prefetch_ahead": ([0, 2, 64], [-1, 65, True], "integer, 0 to 64"),
    "prefetch_cache_size": ([1, 1000], [0, "1GiB", None], "integer, at least 1"),
    "prefetch_cache_bytes": (
        [1, 1 << 40],
        [0, 1.5, "a lot", None],
        "integer, at least 1 (bytes, or text such as 4GiB)",
    ),
}

# key -> (values that are taken, values that are refused, part of the message after "expected")
VALUES: dict[str, tuple[list[Any], list[Any], str]] = {
    "ucm.phase_log": ([None, "steps.jsonl"], [3, True, ["a"]], "path of a file or null"),
    "ucm.phase_log_size": (
        [1 << 16, 1 << 30],
        [1000, None, "a lot"],
        "integer, at least 65536 (bytes, or text such as 4GiB)",
    ),
    "ucm.phase_log_generations": ([1, 99], [0, 100, "5", None], "integer, 1 to 99"),
    "ucm.attention.implementation": (
        ["auto", "reference", "cpu", "native", "hpu", "cuda"],
        ["fast", "CPU", None, 1],
        'one of "auto", "reference", "cpu", "native", "hpu", "cuda", "encoder", "hpu_encoder", "cuda_encoder"',
    ),
    "ucm.kv_cache.partial_hits": ([True, False], ["yes", 1, None], "true or false"),
    "ucm.kv_cache.kept_states": ([0, 1, 64], [-1, "1", 1.0, True, None], "integer, at least 0"),
    "ucm.kv_cache.compaction": ([True, False], ["yes", 1, None], "true or false"),
    "ucm.attention.contiguous_pa": (["auto", True, False], ["yes", 1, 0, None], '"auto" or true or false'),
    "ucm.attention.causal_slice": ([16, 512, 8192], [15, 8193, "512", 512.0, True, None], "integer, 16 to 8192"),
    "ucm.graphs.mode": (
        ["auto", "off", "eager", "capture", "compile"],
        ["on", True, None],
        'one of "auto", "off", "eager", "capture", "compile"',
    ),
    "ucm.graphs.backend": (
        ["inductor", "aot_eager", "eager"],
        ["hpu_backend", None],
        'one of "inductor", "aot_eager", "eager"',
    ),
    "ucm.graphs.skip_guards": ([True, False], [0, "true", None], "true or false"),
    "ucm.graphs.strategy": (
        ["auto", "exponential", "linear", "padding_aware", "file", "trace"],
        ["best", None],
        'one of "auto", "exponential", "linear", "padding_aware", "file", "trace"',
    ),
    "ucm.graphs.buckets": ([None, "buckets.yaml"], [3, True], "path of a file or null"),
    "ucm.graphs.trace": ([None, "phases.jsonl"], [3, True], "path of a file or null"),
    "ucm.graphs.max_graphs": ([2, 64, 4096], [1, 4097, "64", True], "integer, 2 to 4096"),
    "ucm.graphs.max_shared_blocks": ([None, 1, 512], [0, 1.5, True, 1 << 31], "integer, 1 to 2147483647 or null"),
    "ucm.graphs.step_memory": ([0.5, 8.0], [0.0, -1.0, "8", True, None], "number, above 0"),
    "ucm.graphs.warm_up": (["idle", "full", "skeleton"], ["lazy", False], 'one of "idle", "full", "skeleton"'),
    "ucm.graphs.skeleton": ([1, 4, 64], [0, 65, 2.0], "integer, 1 to 64"),
    "ucm.graphs.memory_budget": ([None, 0.5, 8.0], [0.0, -1.0, "8", True], "number, above 0 or null"),
    "ucm.graphs.recipe_check": (["off", "count", "fail"], ["on", True], 'one of "off", "count", "fail"'),
    "ucm.graphs.recipe_cache": ([None, "recipes"], [3, True], "path of a file or null"),
    "ucm.cpu.threads": ([None, 1, 64], [0, -1, "2", 1.5, True], "integer, at least 1 or null"),
    "ucm.cpu.packed_weights": ([True, False], [0, "true", None], "true or false"),
    "ucm.cpu.compact_weights": ([True, False], [1, "no", None], "true or false"),
    "ucm.cpu.matrix_unit": ([True, False], [0, "off", None], "true or false"),
    "ucm.cpu.native_graphs": ([True, False], [1, "on", None], "true or false"),
    "ucm.quantised_experts": (["auto", "codes", "plain"], ["fp8", True, None], 'one of "auto", "codes", "plain"'),
    "ucm.allow_untested_vllm": ([True, False], [1, "yes", None], "true or false"),
    "ucm.distributed.check_ranks": ([True, False], [1, "on", None], "true or false"),
    "ucm.scheduler.admission": (
        ["greedy", "exact"],
        ["fcfs", True, None],
        'one of "greedy", "exact"',
    ),
    "ucm.scheduler.async_scheduling": (["auto", True, False], [1, "on", None], '"auto" or true or false'),
    "ucm.kv_cache.granularity": (["block", "token"], ["slot", 1, None], 'one of "block", "token"'),
    "ucm.kv_cache.max_total_token_num": ([None], [0, 1.5, True], "integer, at least 1 or null"),
    "ucm.preemption.mode": (
        ["recompute", "swap", "auto"],
        ["discard", True, None],
        'one of "recompute", "swap", "auto"',
    ),
    "ucm.preemption.host_memory": (
        [1, 1 << 40],
        [0, 1.5, "a lot", None],
        "integer, at least 1 (bytes, or text such as 4GiB)",
    ),
    "ucm.memory_mode.enabled": ([False], [1, "yes", None], "true or false"),
    "ucm.memory_mode.on_device_ratio": ([0.1, 1.0], [0.0, 1.1, None], "number, above 0 and at most 1"),
    "ucm.memory_mode.refresh_steps": ([1, 64], [0, 1.5, True], "integer, at least 1"),
    "ucm.memory_mode.max_missed": ([0.0, 0.3, 1.0], [-0.1, 1.1, None], "number, 0 to 1"),
    "ucm.memory_mode.moves_per_step": ([1, 64], [0, "8", None], "integer, at least 1"),
    "ucm.memory_mode.history_decay": ([0.0, 0.9, 1.0], [-0.1, 1.1, "0.5"], "number, 0 to 1"),
    "ucm.memory_mode.offloaded_ratio": ([0.5, 64.0], [0.0, 65.0, None], "number, above 0 and at most 64"),
    "ucm.memory_mode.store": (
        [None],
        [3],
        'a mapping with the key kind ("memory" or "file" or "redis" or "tiered"), or a file\'s path',
    ),
    "ucm.ucm_sparse_method": ([None, "GSA", "ESA", "KVStar"], [3, True, ["GSA"]], "text or null"),
    **{f"ucm.ucm_sparse_config.GSA.{name}": values for name, values in BLOCK_OPTIONS.items()},
    "ucm.ucm_sparse_config.GSA.reuse_steps": ([1, 8], [0, 1.0, True], "integer, at least 1"),
    "ucm.ucm_sparse_config.GSA.reuse_layers": ([1, 4], [0, "2", None], "integer, at least 1"),
    "ucm.ucm_sparse_config.GSA.dense_layers": (
        [(), (0, 31)],
        [3, None, "0"],
        "list, each entry integer, at least 0",
    ),
    **{f"ucm.ucm_sparse_config.GSA.{name}": values for name, values in PREFETCH_OPTIONS.items()},
    **{f"ucm.ucm_sparse_config.ESA.{name}": values for name, values in BLOCK_OPTIONS.items()},
    "ucm.ucm_sparse_config.KVStar.checkpoint_interval": ([1, 8], [0, 8.0, "8"], "integer, at least 1"),
    "ucm.ucm_sparse_config.KVStar.lock_duration": ([1, 16], [0, None, True], "integer, at least 1"),
    "ucm.ucm_sparse_config.KVStar.update_threshold": ([0, 2], [-1, 2.5, None], "integer, at least 0"),
    "ucm.ucm_sparse_config.KVStar.base_method": (["GSA", "ESA"], [], "text"),
}


def nested(key: str, value: Any) -> dict[str, Any]:
    """`nested("ucm.cpu.threads", 2)` is `{"ucm": {"cpu": {"threads": 2}}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def read(config: UcmConfig, key: str) -> Any:
    """The value of a key, `ucm.` included."""
    value: Any = config
    for part in key.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_every_key_is_tested_here() -> None:
    """The options of strategies are tested with these, in tests/graphs/test_strategies.py."""
    assert {row.key for row in describe()} == {*VALUES, "ucm.graphs.strategy_options"}


class TracingOptions(Section):
    """The options of a room, in its own file."""

    every: Annotated[int, Field(ge=1)] = Field(default=1, description="Steps between two traces.")


class WithTracing(UcmConfig):
    """What one line in `UcmConfig` adds."""

    tracing: TracingOptions = Field(default=TracingOptions(), description="Tracing.")


def test_a_section_of_a_room_is_one_line() -> None:
    """Checked, hashed, written, named in errors and shown in the table by its declaration alone."""
    row = next(row for row in describe(WithTracing) if row.key == "ucm.tracing.every")
    assert row[1:] == ("integer, at least 1", "1", "Steps between two traces.")
    config = WithTracing.resolve({"tracing": {"every": 8}}, "ucm")
    again = WithTracing.resolve(config.to_dict(), "ucm")
    assert again == config != WithTracing()
    assert hash(again) == hash(config)
    with pytest.raises(UcmConfigError, match=r"ucm\.tracing\.every: found 0, expected integer, at least 1"):
        WithTracing.resolve({"tracing": {"every": 0}}, "ucm")
    with pytest.raises(UcmConfigError, match=r"ucm\.tracng: found an unknown key, expected ucm\.tracing"):
        WithTracing.resolve({"tracng": {}}, "ucm")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALUES for value in VALUES[key][0]])
def test_valid_value(key: str, value: Any) -> None:
    config = resolve_config(nested(key, value))
    words = VALUES[key][2]
    is_path = "path of a file" in words and value is not None and f'"{value}"' not in words
    expected = Path(value) if is_path else value
    assert read(config, key) == expected
    assert type(read(config, key)) is type(expected) or isinstance(expected, Path)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALUES for value in VALUES[key][1]])
def test_bad_value_names_key_found_and_expected(key: str, value: Any) -> None:
    with pytest.raises(UcmConfigError) as caught:
        resolve_config(nested(key, value))
    assert [str(problem) for problem in caught.value.problems] == [f"{key}: found {value!r}, expected {VALUES[key][2]}"]


@pytest.mark.parametrize("entry", [-1, True, "0", 1.5])
def test_bad_entry_of_a_list(entry: Any) -> None:
    with pytest.raises(UcmConfigError) as caught:
        resolve_config(nested("ucm.ucm_sparse_config.GSA.dense_layers", [0, entry]))
    expected = "list, each entry integer, at least 0"
    assert [(p.key, p.found, p.expected) for p in caught.value.problems] == [
        ("ucm.ucm_sparse_config.GSA.dense_layers", repr(entry), expected)
    ]


def test_all_problems_at_once() -> None:
    """One error lists every problem: unknown keys at any depth, wrong types and ranges."""
    bad = {"ucm": {"attention": {"implementaton": "cpu", "causal_slice": 3}, "cpu": {"threads": 0}, "zzz": 1}}
    with pytest.raises(ValueError, match="configuration of vllm-gaudi-ucm") as caught:
        resolve_config(bad)
    message = str(caught.value)
    assert (
        "ucm.attention.implementaton: found an unknown key, "
        "expected ucm.attention.implementation (the nearest valid key)" in message
    )
    assert "ucm.attention.causal_slice: found 3, expected integer, 16 to 8192" in message
    assert "ucm.cpu.threads: found 0" in message
    assert f"ucm.zzz: found an unknown key, expected {SECTIONS}" in message


_CPU_KEYS = " or ".join(
    f"ucm.cpu.{key}" for key in ("compact_weights", "matrix_unit", "native_graphs", "packed_weights", "threads")
)


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ({"ucn": {}}, "ucn", "ucm (the nearest valid key)"),
        ({"ucm": {"atention": {}}}, "ucm.atention", "ucm.attention (the nearest valid key)"),
        ({"ucm": {"cpu": {"thread": 2}}}, "ucm.cpu.thread", "ucm.cpu.threads (the nearest valid key)"),
        ({"ucm": {"cpu": {"cpu": 2}}}, "ucm.cpu.cpu", _CPU_KEYS),
        ({"ucm": {1: 2}}, "ucm.1", SECTIONS),
    ],
)
def test_unknown_key(config: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(UcmConfigError) as caught:
        resolve_config(config)
    assert [(p.key, p.found, p.expected) for p in caught.value.problems] == [(key, "an unknown key", expected)]


@pytest.mark.parametrize("value", [False, 3, "threads", []])
def test_section_that_is_no_mapping(value: Any) -> None:
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": {"cpu": value}})
    assert (
        str(caught.value.problems[0]) == f"ucm.cpu: found {value!r}, expected mapping with the keys "
        "threads, packed_weights, compact_weights, matrix_unit, native_graphs"
    )


@pytest.mark.parametrize("value", [0.5, 3, True, ["a.yaml"]])
def test_ucm_that_is_neither_mapping_nor_path(value: Any) -> None:
    with pytest.raises(UcmConfigError, match="expected a mapping, or the path of a YAML or JSON file"):
        resolve_config({"ucm": value})


@pytest.mark.parametrize("additional_config", [None, {}, {"ucm": {}}])
def test_defaults(additional_config: dict[str, Any] | None) -> None:
    assert resolve_config(additional_config) == UcmConfig()


def test_additional_config_that_is_no_mapping() -> None:
    with pytest.raises(UcmConfigError, match=r"--additional-config: found 'ucm', expected a JSON object"):
        resolve_config("ucm")


def test_round_trip_hash_and_frozen() -> None:
    config = resolve_config({"ucm": {"phase_log": "a.jsonl", "attention": {"contiguous_pa": False}}})
    assert resolve_config({"ucm": json.loads(json.dumps(config.to_dict()))}) == config
    assert hash(resolve_value(config.to_dict())) == hash(config) != hash(UcmConfig())
    with pytest.raises(ValidationError, match="frozen"):
        config.attention.causal_slice = 64


def test_error_survives_the_way_between_processes() -> None:
    """vLLM's multiprocessing hands the engine's error to the front: it must arrive as it left."""
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": {"cpu": {"threads": 0}}})
    twin = copy.copy(caught.value)  # by the same protocol, `__reduce__`
    assert str(twin) == str(caught.value)
    assert twin.problems == caught.value.problems


def test_table_has_a_description_for_every_key() -> None:
    assert all(row.description.endswith(".") and row.type for row in describe())
    assert len(markdown_table().splitlines()) == len(describe()) + 2
    assert all(row.count("|") == 5 for row in markdown_table().splitlines())


def test_slots_for_tokens_and_what_they_exclude() -> None:
    """covers: A18"""
    by_token = {"granularity": "token", "max_total_token_num": 4096}
    assert resolve_config({"ucm": {"kv_cache": by_token}}).kv_cache.max_total_token_num == 4096
    for options, key in (
        ({"kv_cache": {"max_total_token_num": 4096}}, "ucm.kv_cache.max_total_token_num"),
        ({"kv_cache": by_token, "ucm_sparse_method": "GSA"}, "ucm.ucm_sparse_method"),
        ({"kv_cache": by_token, "attention": {"contiguous_pa": True}}, "ucm.attention.contiguous_pa"),
        ({"kv_cache": {**by_token, "compaction": True}}, "ucm.kv_cache.compaction: found true, expected false with"),
        ({"kv_cache": by_token, "preemption": {"mode": "swap"}}, "ucm.preemption.mode: found 'swap', expected"),
    ):
        with pytest.raises(UcmConfigError, match=key):
            resolve_config({"ucm": options})


def test_options_that_exclude_each_other_are_named_together() -> None:
    """Memory mode, which excludes every policy of the KV cache's blocks."""
    off = {
        "partial_hits": "ucm.kv_cache.partial_hits: found true, expected false with ucm.memory_mode",
        "compaction": "ucm.kv_cache.compaction: found true, expected false with ucm.memory_mode",
        "admission": "ucm.scheduler.admission: found 'exact', expected 'greedy' with ucm.memory_mode",
        "mode": "ucm.preemption.mode: found 'auto', expected 'recompute' with ucm.memory_mode",
    }
    policies = {
        "kv_cache": {"partial_hits": True, "compaction": True},
        "scheduler": {"admission": "exact"},
        "preemption": {"mode": "auto"},
    }
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": {"ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}, **policies}})
    assert len(caught.value.problems) == len(off)
    assert all(sentence in str(caught.value) for sentence in off.values())
    assert resolve_config({"ucm": policies}).scheduler.admission == "exact"


def test_removed_rule_of_admission_says_what_to_use() -> None:
    section = {"admission": "predicted", "preemption_rate": 0.1, "least_output": 16}
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": {"scheduler": section}})
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [f"ucm.scheduler.{name}" for name in section]
    assert "ucm.scheduler.admission: found 'predicted', expected 'exact'" in str(caught.value)
    assert "ucm.preemption.mode 'swap'" in str(caught.value)
    with pytest.raises(UcmConfigError, match=r"ucm\.scheduler\.least_output: found 16, expected no such key"):
        resolve_config({"ucm": {"scheduler": {"least_output": 16}}})
