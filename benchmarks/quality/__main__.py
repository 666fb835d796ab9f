"""Measures which answers sparse methods keep: `python -m benchmarks.quality --model FOLDER --lengths 2048 --tasks ...`.

Records go to a journal, from which a run that was stopped goes on. `--report` prints tables of journals without a run.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.quality.budget import Budget
from benchmarks.quality.journal import Journal, read_records, save_records
from benchmarks.quality.measure import DENSE, Key, measure_sample, read_context
from benchmarks.quality.methods import compared
from benchmarks.quality.prompts import sparse_prompts
from benchmarks.quality.report import byte_table, differences, goals, groups, plot, table, task_table
from benchmarks.quality.samples import make_sample
from benchmarks.quality.tasks import TASKS
from benchmarks.sparse_rows import load_causal

MODEL = Path(".cache/models/smollm2-135m-instruct")
VERSIONS = ("vllm-gaudi-ucm", "torch", "transformers", "numpy")


def main() -> None:
    options = parser().parse_args()
    if not options.report:
        run(options)
    paths = options.report or [options.journal]
    every = list(read_records(paths))
    records = [one for one in every if one.ratio in (1, *options.budgets) and one.method in (DENSE, *options.methods)]
    for (model, length, block_size), of_group in groups(records).items():
        print(f"\n## {model}, {length} tokens, blocks of {block_size}\n\n{table(of_group, lambda one: one.score)}")
        print(f"\nNext tokens as in dense attention, %\n\n{table(of_group, lambda one: one.same)}")
        print(f"\n{byte_table(of_group)}")
        ratios = sorted({one.ratio for one in of_group if one.ratio < 1})
        for ratio in ratios:
            print(f"\nBy task at {ratio:.0%}\n\n{task_table(of_group, ratio)}")
        print("\n" + "\n".join([*goals(of_group), *differences(of_group)]), flush=True)
    if options.json:
        versions = {name: version(name) for name in VERSIONS}
        save_records(options.json, every, versions)
    if options.plot:
        shown = "; ".join(f"{model}, {length} tokens, blocks of {size}" for model, length, size in groups(records))
        plot(records, options.plot, f"{len({one.key for one in records})} samples: {shown}")


def run(options: argparse.Namespace) -> None:
    """Measures what the journal lacks, sample by sample over all tasks, so that a run may be stopped at any time."""
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    torch.set_num_threads(options.threads)
    # the model, samples, and every tensor that a method makes
    torch.set_default_device(options.device)
    print(describe_machine())
    journal = Journal(options.journal)
    methods = [one for one in (*compared(), *sparse_prompts()) if one.name in options.methods]
    budgets = [Budget(ratio) for ratio in sorted(options.budgets)]
    tokenizer, model = AutoTokenizer.from_pretrained(options.model), load_causal(options.model, options.device)
    cases = [
        [Key(options.model.name, task, length, options.seed, number, size) for size in options.block_sizes]
        for length in sorted(options.lengths)
        for number in range(options.samples)
        for task in options.tasks
    ]
    for keys in tqdm(cases, unit="sample", disable=None):
        missing = {key: journal.missing(key, methods, budgets) for key in keys}
        wanted = {key: few for key, few in missing.items() if few or not journal.has_dense(key)}
        if wanted:
            one = keys[0]
            sample = make_sample(tokenizer, one.task, one.length, one.seed, one.number)
            context = read_context(model, sample)
            journal.add(record for key, few in wanted.items() for record in measure_sample(context, key, few, budgets))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    names = [one.name for one in (*compared(), *sparse_prompts())]
    found.add_argument("--model", type=Path, default=MODEL, help="a folder with a causal language model")
    found.add_argument("--lengths", type=positive, nargs="+", default=[4096], help="tokens, answers included")
    found.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    found.add_argument("--methods", nargs="*", choices=names, default=names, help="in addition to dense attention")
    found.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3])
    found.add_argument("--block-sizes", type=positive, nargs="+", default=[128], help="they share a dense context")
    found.add_argument("--samples", type=positive, default=10, help="of each task and length")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--threads", type=positive, default=1)
    found.add_argument("--journal", type=Path, default=Path(".cache/quality.jsonl"))
    found.add_argument("--report", type=Path, nargs="+", metavar="JOURNAL", help="only print these journals")
    found.add_argument(
        "--json", type=Path, help="also write records and versions to this file, which --report reads, too"
    )
    found.add_argument("--plot", type=Path)
    return found


if __name__ == "__main__":
    main()
