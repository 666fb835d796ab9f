"""Quality of sparse selection, offline: recall and divergence on real text, look-ups in a long context, every method.

Each method selects blocks for decoded rows in every layer, with the operations that the engine captures; the context is
dense. See benchmarks/retrieval/README.md for the model that looks up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.retrieval.data import Task
from benchmarks.retrieval.model import MODEL as RETRIEVAL_MODEL
from benchmarks.sparse_agreement import Questions, divergence, everything, policy_of
from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import ORACLE, Method, all_methods
from benchmarks.sparse_plot import plot
from benchmarks.sparse_recall import Recalls, measure_recall
from benchmarks.sparse_result import DENSE, Result, goals, table
from benchmarks.sparse_rows import DecodedRows, load_causal
from benchmarks.sparse_text import find_text, read_text

MODEL = Path(".cache/models/smollm2-135m-instruct")
# Rows that recall is sampled from, at the end of the text; divergence is measured on the very last ones.
LAST = 512


def main() -> None:
    """Measures and prints one table for each block size, and the state of the goals."""
    args = _parser().parse_args()
    path = args.text or find_text()
    budgets = [Budget(ratio) for ratio in sorted(args.budgets)]
    print(describe_machine())
    print(f"text: {path.name}, {args.context} tokens; {args.rows} rows for recall, {args.steps} for divergence")
    print(f"look-ups: {args.sequences} sequences of {retrieval_task(args.context)}")
    methods = [method for method in all_methods() if method.name in (ORACLE, *args.methods)]
    recalls, rows = text_recalls(
        args.model, path, args.context, args.rows, args.steps, budgets, args.block_sizes, methods
    )
    questions = Questions.make(
        load_causal(args.retrieval_model), retrieval_task(args.context), args.sequences, seed=args.seed
    )
    results: list[Result] = []
    for size in args.block_sizes:
        found = list(measure(rows, questions, recalls[size], budgets, size, methods))
        results += found
        print(f"\nblocks of {size} tokens\n{table(found)}\n" + "\n".join(goals(found)), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if args.plot:
        plot(results, args.plot, f"Selected blocks of {args.context} tokens: {path.name}, and look-ups")


def retrieval_task(length: int) -> Task:
    """The look-ups of a context: as many records as there are keys, or as half of it holds."""
    return Task(length=length, records=min(384, length // 6), queries=8, answers=8)


def text_recalls(
    model: Path,
    path: Path,
    context: int,
    sampled: int,
    steps: int,
    budgets: Sequence[Budget],
    sizes: Sequence[int],
    methods: Sequence[Method],
) -> tuple[dict[int, Recalls], DecodedRows]:
    """Recalls by block size, and the last `steps` rows of the text, for the divergence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = read_text(path)[: 8 * context]
    tokens = torch.tensor(tokenizer(text, truncation=True, max_length=context)["input_ids"])
    if len(tokens) < context:
        raise SystemExit(f"--text {path} has {len(tokens)} tokens, expected at least --context {context}")
    last = min(LAST, context // 2)
    started = time.perf_counter()
    rows = DecodedRows(load_causal(model), tokens, context - last)
    _tell(f"prompt computed in {time.perf_counter() - started:.0f} s")
    every = max(1, last // sampled)
    recalls = {}
    for size in sizes:
        started = time.perf_counter()
        recalls[size] = measure_recall(rows, torch.arange(every - 1, last, every), methods, budgets, size)
        _tell(f"recall of blocks of {size} in {time.perf_counter() - started:.0f} s")
    rows.advance(last - steps)
    return recalls, rows


def measure(
    rows: DecodedRows,
    questions: Questions,
    recalls: Recalls,
    budgets: Sequence[Budget],
    size: int,
    methods: Sequence[Method],
) -> Iterator[Result]:
    """Results of every method and budget at one block size, dense attention first."""
    dense = rows.logits(everything, size)
    yield Result(size, DENSE, 1.0, 1.0, [], 0.0, 1.0, questions.accuracy(everything, size))
    for method in methods:
        started = time.perf_counter()
        for budget in budgets:
            policy = policy_of(method, budget)
            layers = recalls[method.name, budget.ratio]
            nats, same = divergence(dense, rows.logits(policy, size))
            right = questions.accuracy(policy, size)
            yield Result(size, method.name, budget.ratio, sum(layers) / len(layers), layers, nats, same, right)
        _tell(f"{method.name} with blocks of {size} in {time.perf_counter() - started:.0f} s")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--retrieval-model", type=Path, default=RETRIEVAL_MODEL)
    parser.add_argument("--text", type=Path, help="a long text; default: one that came with a package")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the text and of the look-ups")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3])
    names = [method.name for method in all_methods()]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="besides the oracle; default: all")
    parser.add_argument("--rows", type=int, default=64, help="rows that recall is sampled on")
    parser.add_argument("--steps", type=int, default=32, help="last rows of the text that divergence is measured on")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of 64 look-ups")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser


if __name__ == "__main__":
    main()
