"""`ops` and `graphs` know neither vLLM nor an accelerator's packages, and the plugin's root imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cold_import import PROBE
from vllm_gaudi_ucm import graphs

GRAPHS = Path(graphs.__path__[0])


def modules_of(folder: str) -> tuple[str, ...]:
    """Every module below a folder of `graphs`."""
    files = sorted(file.relative_to(GRAPHS) for file in (GRAPHS / folder).rglob("*.py") if file.stem != "__init__")
    return tuple(".".join(("vllm_gaudi_ucm.graphs", *file.with_suffix("").parts)) for file in files)


ROOMS = (
    "vllm_gaudi_ucm.ops",
    "vllm_gaudi_ucm.graphs",
    "vllm_gaudi_ucm.graphs.shapes.bucket",
    "vllm_gaudi_ucm_tools.recipes.recorder",
    *modules_of("runners"),
    *modules_of("warm_up"),
    "vllm_gaudi_ucm.ops.causal_conv1d.api",
    "vllm_gaudi_ucm.ops.chosen_tokens.api",
    "vllm_gaudi_ucm.ops.gated_delta.api",
    "vllm_gaudi_ucm.ops.kv_cache.api",
    "vllm_gaudi_ucm.ops.lora.api",
    "vllm_gaudi_ucm.ops.state_space.api",
    "vllm_gaudi_ucm.ops.block_selection.api",
    "vllm_gaudi_ucm.ops.block_selection.impl.reference",
    "vllm_gaudi_ucm.ops.unified_attention.api",
    "vllm_gaudi_ucm.ops.cpu.host_memory",
    "vllm_gaudi_ucm.ops.cpu.native.library",
    "vllm_gaudi_ucm.ops.cpu.packed_linear.api",
    "vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm",
    "vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary",
    "vllm_gaudi_ucm.ops.registry",
    "vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate",
    "vllm_gaudi_ucm.ops.unified_attention.impl.cpu.attention",
    "vllm_gaudi_ucm.ops.unified_attention.impl.cpu.native",
    "vllm_gaudi_ucm.ops.unified_attention.impl.reference",
)


def test_the_folders_have_modules() -> None:
    assert {"vllm_gaudi_ucm.graphs.runners.cuda.graphs", "vllm_gaudi_ucm.graphs.warm_up.idle_warm_up"} <= set(ROOMS)


@pytest.mark.parametrize(
    ("banned", "modules"),
    [
        (("vllm", "triton", "habana_frameworks"), ROOMS),
        (("vllm", "torch"), ("vllm_gaudi_ucm",)),
    ],
)
def test_banned_modules_stay_out(banned: tuple[str, ...], modules: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", PROBE, ",".join(banned), ",".join(modules)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
