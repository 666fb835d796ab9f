"""The files that a steady decode step enters are those of the walk in docs/architecture.md, and few."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.serving import Engine
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution
from vllm_gaudi_ucm.execution.graph_manager import ForwardGraphs

ROOT = Path(__file__).parents[2]
# What the walk does not count: operations, and vLLM's layers that call them; the record of the step; names of vLLM.
LEAVES = ("ops/", "vllm_gaudi_ucm/layers/", "vllm_gaudi_ucm/observability/", "vllm_gaudi_ucm/vllm_api/")
MOST_FILES = 22
# What a captured graph replays: its Python runs once, when it is captured.
REPLAYED = {ForwardGraphs._run.__code__, BucketedExecution._run_logits.__code__}
# Two requests of four tokens: neither prompts nor new blocks are in these steps.
STEADY_STEPS = range(6, 10)


class EnteredFiles:
    """Files of the project whose functions run within `entered`, in the order of the first call."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._is_replaying = False

    def traced(self, call: Callable[..., Any], is_steady: Callable[[], bool]) -> Callable[..., Any]:
        """`call`, traced in steady steps."""

        def run(*args: Any, **options: Any) -> Any:
            if not is_steady():
                return call(*args, **options)
            before = sys.getprofile()
            sys.setprofile(self._enter)
            try:
                return call(*args, **options)
            finally:
                sys.setprofile(before)

        return run

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        """What a graph replays is no Python, so what stands for it here does not count."""
        if event not in ("call", "return"):
            return
        if frame.f_code in REPLAYED:
            self._is_replaying = event == "call"
        elif self._is_replaying:
            return
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT) or "site-packages" in file.parts:
            return
        name = str(file.relative_to(ROOT))
        if name not in self.files and not name.startswith(("tests/", *LEAVES)):
            self.files.append(name)


def walk(title: str) -> set[str]:
    """Files of the numbered lines of a section, without the leaves."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n")[1].split("\n#")[0]
    lines = "\n".join(line for line in section.splitlines() if re.match(r"\d+\. ", line))
    return {file for file in re.findall(r"`([\w/]+\.py)`", lines) if not file.startswith(LEAVES)}


def entered_files(model: Path, ucm: dict[str, Any]) -> list[str]:
    entered, steps = EnteredFiles(), 0
    with Engine(model, ucm) as engine:
        worker: Any = engine.core.model_executor.driver_worker.worker
        execute_model = entered.traced(worker.execute_model, lambda: steps in STEADY_STEPS)

        def execute(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            return execute_model(*args)

        worker.execute_model = execute
        worker.sample_tokens = entered.traced(worker.sample_tokens, lambda: steps in STEADY_STEPS)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        engine.generate([[5, 6, 7, 8], [9, 6, 7, 8]], params)
    return entered.files


@pytest.mark.parametrize(
    ("title", "ucm"),
    [
        ("At its true shape", {"cpu": {"native_graphs": False}}),
        ("In a bucket", {"graphs": {"mode": "eager", "warm_up": "full", "max_graphs": 8}}),
    ],
)
def test_a_steady_decode_enters_the_files_of_its_walk(tiny_llama: Path, title: str, ucm: dict[str, Any]) -> None:
    files = entered_files(tiny_llama, ucm)
    assert set(files) == walk(title)
    assert len(files) <= MOST_FILES
