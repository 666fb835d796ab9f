"""Loads stored prompts in part on the device that VLLM_GAUDI_UCM_DEVICE names: GSA, memory mode and the KV connector.

Over memory and files, with graphs and operator by operator. If no block may be missed, answers must equal those of
whole loads, and first tokens those without a store. Otherwise, blocks must stay in the store and come back.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_partial_loads.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from check_device import NEW_TOKENS, VOCABULARY, make_model
from check_device_stores import BLOCK, MEMORY_MODE, Engine, transfer
from vllm.platforms import current_platform

from vllm_gaudi_ucm.observability.phase_log import read_phase_log

# Stored blocks, and the computed tokens after them. One token is a decode, which always chooses blocks; two or more run
# in a graph for prompt remainders, and attend to everything if no block is missing.
SIZES = (40, 1), (30, 2), (25, BLOCK // 2), (20, BLOCK)
STORED = sum(blocks for blocks, _ in SIZES)


class Found(NamedTuple):
    """Results for stored prompts: answers, and blocks that the connector loaded; by memory mode: blocks left in the
    store, blocks that came back later, blocks lost; first steps that were computed twice.
    """

    answers: list[list[int]]
    brought: int = 0
    left: int = 0
    back: int = 0
    failed: int = 0
    repeated: int = 0


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCABULARY, (n * BLOCK + tail,), generator=generator).tolist() for n, tail in SIZES]


def graph_modes() -> tuple[str, str]:
    """Returns how steps run: as graphs if the device has them, otherwise at true shapes; and operator by operator."""
    return ("off" if current_platform.device_type == "cpu" else "capture"), "eager"


def gsa(mode: str, **memory_mode: Any) -> dict[str, Any]:
    """Options of the plugin; without `memory_mode` every load is whole."""
    found = {**MEMORY_MODE, "graphs": {"mode": mode, "max_graphs": 24, "warm_up": "full"}}
    if not memory_mode:
        del found["memory_mode"]
        return found
    return {**found, "memory_mode": {**MEMORY_MODE["memory_mode"], **memory_mode}}


class StoredEngine(Engine):
    """An engine with a store, empty at first. remainders: steps that ran in their graphs, at its end."""

    def __init__(self, folder: str, ucm: dict[str, Any], kind: str) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._log = Path(self._files.name) / "phases.jsonl"
        places: dict[str, dict[str, Any]] = {
            "memory": {"capacity": 1 << 30},
            "file": {"path": f"{self._files.name}/blocks", "deadline": 10.0},
        }
        store = transfer({"kind": kind, **places[kind]}, save_queue=4096)
        super().__init__(folder, {**ucm, "phase_log": str(self._log)}, kv_transfer_config=store)
        core: Any = self.llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.remainders = 0
        self._worker = runner.transfer.connector.worker_side

    def stored_answers(self, prompts: list[list[int]], new_tokens: int) -> Found:
        """Answers to prompts that were computed before; the device's own prefix cache knows nothing of them."""
        self._forget()
        before = self._counts()
        answers, cached = self.answers(prompts, new_tokens)
        assert cached == STORED * BLOCK, f"{cached} tokens came from the store, expected {STORED * BLOCK}"
        changes = (after - then for after, then in zip(self._counts(), before, strict=True))
        return Found(answers, *changes)

    def end(self) -> None:
        super().end()
        self.remainders = sum(step.prompt_remainder for step in read_phase_log(self._log)[1])
        self._files.cleanup()

    def _forget(self) -> None:
        for _ in range(3):
            # the end of a request is reported with the next step
            self.llm.llm_engine.step()
        assert self._worker.saver.flush(30.0)
        assert self.llm.reset_prefix_cache()

    def _counts(self) -> tuple[int, ...]:
        brought = self._worker.load_counts.loaded_blocks
        offload = getattr(self.scheduler, "offload", None)
        if offload is None:
            return (brought, 0, 0, 0, 0)
        totals = offload.totals
        return (brought, totals.stored, totals.loaded + totals.found, totals.failed, totals.repeated)


def loaded_whole(folder: str) -> Found:
    """GSA alone, at true shapes: there the first step summarises all blocks, as a load in part finds them."""
    engine = StoredEngine(folder, gsa("off"), "memory")
    engine.answers(make_prompts())
    found = engine.stored_answers(make_prompts(), NEW_TOKENS)
    engine.end()
    print(f"loaded whole: {_blocks(found)}", flush=True)
    assert found.brought == STORED
    return found


def check_nothing_missed(folder: str, kind: str, mode: str, whole: Found, dense: list[list[int]]) -> bool:
    """Every first step is computed again once all blocks are there."""
    engine = StoredEngine(folder, gsa(mode, max_missed=0.0), kind)
    engine.answers(make_prompts())
    found = engine.stored_answers(make_prompts(), NEW_TOKENS)
    engine.end()
    equal = sum(a == b for a, b in zip(found.answers, whole.answers, strict=True))
    remainders = [a[0] == b[0] for a, b, (_, tail) in zip(found.answers, dense, SIZES, strict=True) if tail > 1]
    print(
        f"{kind} store, {mode}, nothing missed: {equal} of {len(SIZES)} answers equal those of whole loads, "
        f"{sum(remainders)} of {len(remainders)} first tokens of remainders those without a store; {_blocks(found)}",
        flush=True,
    )
    counted = found.brought == STORED and found.left > 0 and not found.failed
    return equal == found.repeated == len(SIZES) and all(remainders) and counted


def check_left_in_store(folder: str, kind: str, mode: str) -> tuple[bool, list[list[int]]]:
    """Checks first steps, which are final whatever they miss, and their tokens; later results depend on when blocks
    arrive.
    """
    prompts = make_prompts()
    engine = StoredEngine(folder, gsa(mode, max_missed=1.0), kind)
    # one token: blocks for later ones depend on time, and frequently needed blocks are loaded first
    engine.answers(prompts, 1)
    first, later = (engine.stored_answers(prompts, count) for count in (1, NEW_TOKENS))
    engine.end()
    print(
        f"{kind} store, {mode}, left: {_blocks(first)}; with {NEW_TOKENS} tokens {_blocks(later)}; "
        f"{engine.remainders} steps in graphs for prompt remainders",
        flush=True,
    )
    remainders = 0 if mode == "off" else 2 * sum(tail > 1 for _, tail in SIZES)
    counted = all(one.brought + one.left == STORED and one.left and not one.repeated for one in (first, later))
    complete = all(len(answer) == NEW_TOKENS for answer in later.answers) and engine.remainders == remainders
    return counted and complete and later.back > 0 and not first.failed + later.failed, first.answers


def _blocks(found: Found) -> str:
    return (
        f"{found.brought} of {STORED} blocks brought, {found.left} left, {found.back} back later, {found.failed} "
        f"lost, {found.repeated} repeated"
    )


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{type(current_platform).__name__} on {current_platform.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        engine = Engine(folder, {})
        dense, _ = engine.answers(make_prompts(), 1)
        engine.end()
        whole = loaded_whole(folder)
        right, tokens = [], []
        for kind in ("memory", "file"):
            for mode in graph_modes():
                right.append(check_nothing_missed(folder, kind, mode, whole, dense))
                counted, first = check_left_in_store(folder, kind, mode)
                right.append(counted)
                tokens.append(first)
    alike = all(other == tokens[0] for other in tokens)
    print(f"first tokens with blocks in the store are {'' if alike else 'not '}the same in all of these", flush=True)
    return 0 if all(right) and alike else 1


if __name__ == "__main__":
    sys.exit(main())
