"""Accepted length under a selection against dense verification: the same drafts, in the same contexts.

The draft model is the model with its layers' weights rounded to 4 bits, so a dense target rejects some of its drafts,
too. Long real text is continued. At a temperature the expected length is compared, so sampling adds no noise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import product
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.sparse_rows import load_causal
from benchmarks.sparse_shared_choice import SharedChoice
from benchmarks.sparse_text import find_text, read_text
from benchmarks.sparse_verification import Rows, dense_continuation, rounded, verify
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="instead of prose that came with a package")
    parser.add_argument("--context", type=int, default=7424)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--bits", type=int, default=4, help="of the draft model's weights; 0: it is the model itself")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--locks", type=int, nargs="+", default=[1, 8], help="verifications that share a choice")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    cases = list(product(options.block_sizes, options.ratios, options.locks))
    dense, found = measure(options, cases)
    print(
        f"{describe_machine()}; {options.prompts} prompts of {options.context} tokens, {options.drafts} drafts of "
        f"{options.bits} bits, temperature {options.temperature:g}, {sum(map(len, dense))} verifications"
    )
    print(f"{'blocks of':>9}{'ratio':>7}{'lock':>6}{'tokens/step':>13}{'dense':>7}{'of dense':>10}{'error':>8}")
    for (block, ratio, lock), lengths in zip(cases, found, strict=True):
        share, error = ratio_of_sums(lengths, dense)
        count = sum(map(len, dense))
        means = sum(map(sum, lengths)) / count, sum(map(sum, dense)) / count
        print(f"{block:>9}{ratio:>7g}{lock:>6}{means[0]:>13.2f}{means[1]:>7.2f}{share:>10.1%}{error:>8.1%}", flush=True)
    if options.json:
        rows = [dict(zip(("block_size", "ratio", "lock"), case, strict=True)) for case in cases]
        figures = {"machine": describe_machine(), "dense": dense, "cases": rows, "found": found}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(
    options: argparse.Namespace, cases: list[tuple[int, float, int]]
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Tokens of each verification, `[prompts][verifications]`: of dense ones, and for each case."""
    from transformers import AutoTokenizer

    model = load_causal(options.model)
    draft = rounded(model, options.bits) if options.bits else model
    text = options.text.read_text(encoding="utf-8") if options.text else read_text(find_text())
    tokens = AutoTokenizer.from_pretrained(options.model)(text).input_ids
    if len(tokens) < options.prompts * options.context:
        raise SystemExit(f"the text has {len(tokens)} tokens, expected {options.prompts} x {options.context}")
    dense, found = [], [[] for _ in cases]
    for index in range(options.prompts):
        start = time.perf_counter()
        prompt = tokens[index * options.context : (index + 1) * options.context]
        target, proposer = Rows(model, prompt), Rows(draft, prompt)
        done = dense_continuation(
            target, proposer, prompt, options.new_tokens, options.drafts, options.temperature, index
        )
        dense.append([step.accepted for step in done.verifications])
        for (block, ratio, lock), lengths in zip(cases, found, strict=True):
            choice = SharedChoice(GsaOptions(sparse_ratio=ratio, min_tokens=1), lock)
            lengths.append(verify(target, done, choice, block, options.temperature))
        print(f"prompt {index + 1} of {options.prompts}: {time.perf_counter() - start:.0f} s", flush=True)
    return dense, found


def ratio_of_sums(lengths: list[list[float]], dense: list[list[float]]) -> tuple[float, float]:
    """Accepted length against dense, and the standard error of that over prompts (nan for one prompt)."""
    pairs = [(sum(mine), sum(theirs)) for mine, theirs in zip(lengths, dense, strict=True)]
    total, count = sum(theirs for _, theirs in pairs), len(pairs)
    share = sum(mine for mine, _ in pairs) / total
    if count < 2:
        return share, math.nan
    spread = sum((mine - share * theirs) ** 2 for mine, theirs in pairs) / (count - 1)
    return share, math.sqrt(spread * count) / total


if __name__ == "__main__":
    main()
