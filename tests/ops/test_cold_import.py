"""`ops` and `graphs` know neither vLLM nor an accelerator's packages, and the plugin's root imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gaudi_ucm import graphs

PROBE = """
import sys
for name in sys.argv[2].split(","):
    __import__(name)
banned = [name for name in sys.argv[1].split(",") if name in sys.modules]
assert not banned, f"imported {banned}"
"""
GRAPHS = Path(graphs.__path__[0])


def modules_of(folder: str) -> tuple[str, ...]:
    """Every module of a folder of `graphs`."""
    names = sorted(file.stem for file in (GRAPHS / folder).glob("*.py") if file.stem != "__init__")
    return tuple(f"vllm_gaudi_ucm.graphs.{folder}.{name}" for name in names)


ROOMS = (
    "vllm_gaudi_ucm.ops",
    "vllm_gaudi_ucm.graphs",
    "vllm_gaudi_ucm.graphs.shapes.bucket",
    "vllm_gaudi_ucm.graphs.recipes.recorder",
    *modules_of("runners"),
    *modules_of("warm_up"),
    "vllm_gaudi_ucm.ops.kv_cache.api",
    "vllm_gaudi_ucm.ops.block_selection.api",
    "vllm_gaudi_ucm.ops.block_selection.impl.reference",
    "vllm_gaudi_ucm.ops.unified_attention.api",
    "vllm_gaudi_ucm.ops.host_memory.api",
    "vllm_gaudi_ucm.ops.mem_state.api",
    "vllm_gaudi_ucm.ops.native.library",
    "vllm_gaudi_ucm.ops.packed_linear.api",
    "vllm_gaudi_ucm.ops.rms_norm.api",
    "vllm_gaudi_ucm.ops.rotary.api",
    "vllm_gaudi_ucm.ops.registry",
    "vllm_gaudi_ucm.ops.silu_and_mul.api",
    "vllm_gaudi_ucm.ops.unified_attention.impl.cpu",
    "vllm_gaudi_ucm.ops.unified_attention.impl.native",
    "vllm_gaudi_ucm.ops.unified_attention.impl.reference",
)


def test_the_folders_have_modules() -> None:
    assert {"vllm_gaudi_ucm.graphs.runners.cuda", "vllm_gaudi_ucm.graphs.warm_up.idle_warm_up"} <= set(ROOMS)


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
