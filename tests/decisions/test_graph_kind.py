"""What `ucm.graphs.mode` means on each device."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.decisions.graph_kind import graph_kind, options_without_effect

# (device, lazy) -> kind by mode; `auto+` is auto with --enforce-eager; None: an error
TABLE: dict[tuple[str, bool], dict[str, str | None]] = {
    ("cpu", True): {
        "auto": "off",
        "auto+": "off",
        "off": "off",
        "eager": "eager",
        "capture": None,
        "compile": "compile",
    },
    ("cuda", True): {
        "auto": "cuda_graph",
        "auto+": "off",
        "off": "off",
        "eager": "eager",
        "capture": "cuda_graph",
        "compile": "compile",
    },
    ("hpu", True): {
        "auto": "hpu_graph",
        "auto+": "eager",
        "off": "off",
        "eager": "eager",
        "capture": "hpu_graph",
        "compile": None,
    },
    ("hpu", False): {
        "auto": "compile",
        "auto+": "eager",
        "off": "off",
        "eager": "eager",
        "capture": None,
        "compile": "compile",
    },
}
# Lazy mode is Gaudi's: elsewhere it changes nothing.
TABLE[("cpu", False)], TABLE[("cuda", False)] = TABLE[("cpu", True)], TABLE[("cuda", True)]
CASES = [(*place, mode, kind) for place, kinds in TABLE.items() for mode, kind in kinds.items()]


def config(mode: str, implementation: str = "auto") -> UcmConfig:
    ucm: dict[str, Any] = {"graphs": {"mode": mode}, "attention": {"implementation": implementation}}
    return resolve_config({"ucm": ucm})


@pytest.mark.parametrize(("device", "lazy", "mode", "kind"), CASES)
def test_kinds(device: str, lazy: bool, mode: str, kind: str | None) -> None:
    found = config(mode.removesuffix("+"))
    if kind is None:
        with pytest.raises(
            ValueError,
            match=r"ucm\.graphs\.mode: '(capture' has no graphs to capture|compile' is not possible in .* lazy)",
        ):
            graph_kind(found, device, lazy, False)
    else:
        assert graph_kind(found, device, lazy, mode.endswith("+")) == kind


@pytest.mark.parametrize("mode", ["off", "eager", "capture"])
def test_enforce_eager_decides_only_where_the_mode_is_auto(mode: str) -> None:
    assert graph_kind(config(mode), "hpu", True, True) == graph_kind(config(mode), "hpu", True, False)


def test_an_error_says_where_and_what_else_there_is() -> None:
    with pytest.raises(ValueError, match=r"on hpu outside of lazy mode .*; expected 'compile', 'eager' or 'off'"):
        graph_kind(config("capture"), "hpu", False, False)
    with pytest.raises(ValueError, match="on cpu; expected"):
        graph_kind(config("capture"), "cpu", True, False)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_kernels_that_read_shapes_on_the_host_exclude_static_shapes(mode: str) -> None:
    """covers: A18. Refused by name, not silently replaced."""
    with pytest.raises(ValueError, match=rf"ucm\.attention\.implementation: 'cpu' .* ucm\.graphs\.mode '{mode}'"):
        graph_kind(config(mode, "cpu"), "cpu", True, False)
    for static in ("reference", "hpu"):
        assert graph_kind(config(mode, static), "cpu", True, False) == mode
    assert graph_kind(config("off", "cpu"), "cpu", True, False) == "off"


def test_kernels_that_torch_compile_cannot_trace_are_refused_there() -> None:
    """covers: A18"""
    with pytest.raises(ValueError, match=r"ucm\.attention\.implementation: 'cuda' .* ucm\.graphs\.mode 'compile'"):
        graph_kind(config("compile", "cuda"), "cuda", True, False)
    assert graph_kind(config("auto", "cuda"), "cuda", True, False) == "cuda_graph"
    assert graph_kind(config("compile", "auto"), "cuda", True, False) == "compile"


@pytest.mark.parametrize(
    ("graphs", "kind", "device", "expected"),
    [
        ({}, "off", "cpu", []),
        ({"mode": "off"}, "off", "hpu", []),
        ({"max_graphs": 8, "buckets": "b.yaml"}, "off", "cpu", ["ucm.graphs.buckets", "ucm.graphs.max_graphs"]),
        ({"mode": "eager", "max_graphs": 8}, "eager", "cpu", []),
        ({"mode": "eager", "memory_budget": 1.0}, "eager", "cpu", ["ucm.graphs.memory_budget"]),
        ({"memory_budget": 1.0}, "cuda_graph", "cuda", []),
    ],
)
def test_options_that_change_nothing_are_named(
    graphs: dict[str, Any], kind: Any, device: str, expected: list[str]
) -> None:
    config = resolve_config({"ucm": {"graphs": graphs}})
    assert options_without_effect(config.graphs, kind, device) == expected
