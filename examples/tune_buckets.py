"""Tuned buckets: from the phase log of a server to a bucket file, compared with a general strategy.

    python examples/tune_buckets.py                         # a synthetic log of chat traffic
    python examples/tune_buckets.py --log phases.jsonl      # the log of a server: {"ucm": {"phase_log": ...}}

Runs the commands `gaudi-ucm tune` and `gaudi-ucm plan`. It needs no model and no engine: every figure is modelled.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from vllm_gaudi_ucm.cli.main import main as gaudi_ucm


def run(*arguments: str) -> None:
    """Runs a command in the terminal; ends the script if it fails."""
    print(f"\n$ gaudi-ucm {' '.join(arguments)}", flush=True)
    if status := gaudi_ucm(arguments):
        sys.exit(status)


def main(log: str | None, graphs: str, output: str) -> None:
    """Writes the bucket file `output`."""
    with tempfile.TemporaryDirectory() as folder:
        if log is None:
            log = str(Path(folder) / "phases.jsonl")
            run("trace", "--mix", "chat", "--steps", "2000", "-o", log)
        run("tune", log, "--max-graphs", graphs, "--holdout", "0.2", "-o", output)
        run("plan", "--log", log, "--buckets", output)
        run("plan", "--log", log, "--strategy", "padding_aware", "--max-graphs", graphs)
    print(f'\nServe with: --additional-config \'{{"ucm": {{"graphs": {{"buckets": "{output}"}}}}}}\'')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tunes buckets to a phase log and shows the plan.")
    parser.add_argument("--log", help="phase log (default: a synthetic one)")
    parser.add_argument("--max-graphs", default="32", help="graphs, forward and logits together (default: %(default)s)")
    parser.add_argument("-o", "--output", default="buckets.yaml", help="bucket file to write (default: %(default)s)")
    chosen = parser.parse_args()
    main(chosen.log, chosen.max_graphs, chosen.output)
