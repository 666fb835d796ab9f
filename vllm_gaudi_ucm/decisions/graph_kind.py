"""Decides which kind of graphs a server uses, from `ucm.graphs.mode` and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_gaudi_ucm.ops.registry import AUTO, has_folders
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig

GraphKind = Literal["off", "eager", "cuda_graph", "hpu_graph", "compile"]


def graph_kind(config: UcmConfig, device: str, lazy: bool, enforce_eager: bool) -> GraphKind:
    """The kind of graphs.

    Args:
        lazy: Gaudi's lazy mode (PT_HPU_LAZY_MODE), in which its bridge does not compile; irrelevant elsewhere.
        enforce_eager: `--enforce-eager`, which decides if the mode is `auto`. Gaudi still needs static shapes then:
            every new one is compiled.

    Raises:
        ValueError: the device has no such graphs, or an option contradicts static shapes.
    """
    mode = config.graphs.mode
    if mode == "auto":
        kind = _automatic(device, lazy, enforce_eager)
    elif mode == "capture":
        kind = _captured(device, lazy)
    elif mode == "compile" and device == "hpu" and lazy:
        raise ValueError(
            "ucm.graphs.mode: 'compile' is not possible in Gaudi's lazy mode (PT_HPU_LAZY_MODE is set); expected "
            "'capture', 'eager' or 'off'; unset PT_HPU_LAZY_MODE to compile"
        )
    else:
        kind = mode
    if kind != "off" and config.attention.implementation != AUTO:
        _check_named(config.attention.implementation, kind, mode)
    return kind


def _check_named(name: str, kind: GraphKind, mode: str) -> None:
    """Raises ValueError for an implementation of attention that these graphs exclude."""
    implementation = ATTENTION.make(name)
    if not implementation.capturable:
        raise ValueError(
            f"ucm.attention.implementation: {name!r} reads a step's shape on the host, "
            f"which ucm.graphs.mode {mode!r} excludes; set the implementation to 'auto', or the mode to 'off'"
        )
    if kind == "compile" and not implementation.traceable:
        raise ValueError(
            f"ucm.attention.implementation: {name!r} launches kernels of its own, which ucm.graphs.mode 'compile' "
            "cannot trace; set the implementation to 'auto', or the mode to 'capture'"
        )


def _automatic(device: str, lazy: bool, enforce_eager: bool) -> GraphKind:
    if device == "cpu":
        return "off"
    if enforce_eager:
        return "eager" if device == "hpu" else "off"
    if device == "cuda":
        return "cuda_graph" if has_folders(device) else "off"
    if not lazy:
        return "compile"
    return "hpu_graph" if has_folders(device) else "eager"


def _captured(device: str, lazy: bool) -> GraphKind:
    if device != "cpu" and not has_folders(device):
        raise ValueError(
            f"ucm.graphs.mode: 'capture' needs the folders of {device}, which were left out of this installation; "
            "expected 'auto', 'eager' or 'off', or an installation with them"
        )
    if device == "cuda":
        return "cuda_graph"
    if device == "hpu" and lazy:
        return "hpu_graph"
    where = "on hpu outside of lazy mode (PT_HPU_LAZY_MODE is unset or 0)" if device == "hpu" else f"on {device}"
    raise ValueError(
        f"ucm.graphs.mode: 'capture' has no graphs to capture {where}; expected 'compile', 'eager' or 'off'"
    )


def options_without_effect(graphs: GraphsConfig, kind: GraphKind, device: str) -> list[str]:
    """Keys of `ucm.graphs` that were set and change nothing, for a warning: they may be meant for another device."""
    given = [name for name in graphs.model_fields_set if name != "mode"]
    if kind == "off":
        return sorted(f"ucm.graphs.{name}" for name in given)
    return ["ucm.graphs.memory_budget"] if device == "cpu" and graphs.memory_budget is not None else []
