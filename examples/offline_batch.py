"""Offline batch: several prompts through vLLM's `LLM` class, and the steps that the engine took.

    make model                                   # the demo model, once
    python examples/offline_batch.py

The script does not name a device: it runs on the reference device (CPU) and on a Gaudi. `LLM(...)` starts the engine in
a separate process, which imports this script again. So the call has to be inside `if __name__ == "__main__":`.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from vllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The largest planet of the solar system is"]
MODEL = ".cache/models/smollm2-135m-instruct"


def answer(model: str, phase_log: Path) -> None:
    """Prints an answer for each prompt."""
    llm = LLM(
        model,
        dtype="float32",  # bfloat16 on a Gaudi
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        additional_config={"ucm": {"phase_log": str(phase_log)}},
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


def show_steps(phase_log: Path) -> None:
    """Prints the number of steps of each phase: `c--` computes prompts, `--u` decodes."""
    steps = [json.loads(line) for line in phase_log.read_text().splitlines()]
    phases = Counter(step["bucket"][0] for step in steps if "bucket" in step)
    print("steps:", ", ".join(f"{count} x {phase}" for phase, count in phases.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers several prompts offline.")
    parser.add_argument("--model", default=MODEL, help="folder of a model (default: the demo model)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "phases.jsonl"
        answer(arguments.model, log)
        show_steps(log)
