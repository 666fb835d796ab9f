"""Decode steps of the whole engine with a sparse method against its own dense one, in turn, in one run.

Weights, contexts and summaries are random: a step takes as long as with others. The dense engine stays, the others come
one after the other; each order is given to both, and an engine is stopped while another one works. On a GPU the device
time of a step is measured as well as the wall clock's, and the kernels that take longest are named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.machine import describe_machine
from benchmarks.positive import positive

BLOCK_SIZE = 128
NEW_TOKENS = 256
ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("sparse_engine_worker.py")
# a common 8B model, and one whose steps a CPU computes in milliseconds
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
SIZES = {"cuda": ("8x32768", "1x131072", "1x8192"), "cpu": ("1x8192", "8x8192", "1x32768", "8x32768")}
DENSE = "dense"
METHODS = ("GSA", "KVStar")
SUMMARY_DTYPES = ("auto", "fp8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 2 if an engine ends."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        model = options.model or random_model(Path(name), options)
        dense = side(DENSE, {}, model, options)
        try:
            rows = measure(dense, model, options)
        except SideFailed as error:
            print(f"benchmarks.sparse_engine: {error}", file=sys.stderr)
            return 2
        finally:
            dense.stop()
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--model", type=Path, help="folder of a model, in place of random weights")
    parser.add_argument("--shape", choices=SHAPES, help="of random weights; without it 8b on a GPU, small on a CPU")
    parser.add_argument("--layers", type=positive, help="of random weights; without it those of the shape")
    parser.add_argument("--sizes", nargs="+", type=size, metavar="REQUESTSxCONTEXT")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.3])
    parser.add_argument("--summary", help="of the methods; without it their own")
    parser.add_argument(
        "--summary-dtypes",
        nargs="+",
        choices=SUMMARY_DTYPES,
        default=["auto"],
        help="of the methods, one engine for each; their tokens are compared",
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=["auto"],
        metavar="NAME",
        help="of block selection, one engine for each; their tokens are compared",
    )
    parser.add_argument("--always", action="store_true", help="sparse_steps: always, where a choice does not pay, too")
    parser.add_argument("--steps", type=positive, default=24)
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--max-graphs", type=positive, default=32)
    parser.add_argument("--kernels", type=int, default=12, help="of a GPU, to name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("8b" if options.device == "cuda" else "small")
    options.sizes = options.sizes or [size(text) for text in SIZES[options.device]]
    return options


def size(text: str) -> tuple[int, int]:
    """(requests, tokens of context, in whole blocks)."""
    requests, _, context = text.partition("x")
    try:
        found = positive(requests), positive(context)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a size such as 8x32768") from None
    if found[1] % BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a context of whole blocks of {BLOCK_SIZE}")
    return found


def random_model(folder: Path, options: argparse.Namespace) -> Path:
    """A folder with the configuration of a model."""
    shape = SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": longest(options),
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16" if options.device == "cuda" else "float32",
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_layer_of(model: Path) -> Path:
    """A draft model: an engine takes one, so that it drafts as others do, and another proposer is put in its place."""
    folder = model / "draft"
    folder.mkdir(exist_ok=True)
    shape = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1}))
    return folder


def longest(options: argparse.Namespace) -> int:
    return max(context for _, context in options.sizes) + NEW_TOKENS


def served(
    model: Path, options: argparse.Namespace, ucm: dict[str, Any], *, chunk: int, new: int, drafts: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the arguments of an engine whose KV cache has room for the largest order, and its environment.

    chunk: rows of a step. new: tokens of each answer. drafts: whether there is a draft model, of one layer, in its own
    blocks.
    """
    blocks = max(requests * (-(-(context + new) // BLOCK_SIZE) + 1) for requests, context in options.sizes) + 2
    shape = json.loads((model / "config.json").read_text())
    dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * (shape["num_hidden_layers"] + drafts) * shape["num_key_value_heads"] * dim
    # without graphs on a CPU, as there by default
    graphs = {} if options.device == "cpu" else {"graphs": {"warm_up": "full", "max_graphs": options.max_graphs}}
    arguments = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "max_model_len": max(context for _, context in options.sizes) + new,
        "max_num_seqs": max(requests for requests, _ in options.sizes),
        "max_num_batched_tokens": chunk,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": blocks * BLOCK_SIZE * per_token * (2 if options.device == "cuda" else 4),
        "additional_config": {"ucm": {**ucm, **graphs}},
    }
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_GAUDI_UCM_DEVICE": options.device,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return arguments, environment


def side(
    name: str, ucm: dict[str, Any], model: Path, options: argparse.Namespace, drafts: int = 0, weights: str = "dummy"
) -> EngineSide:
    """An engine in a process of its own.

    drafts: of each request in a step. weights: how they are loaded if the model has none.
    """
    arguments, environment = served(model, options, ucm, chunk=1024, new=NEW_TOKENS, drafts=bool(drafts))
    if not options.model:
        arguments["load_format"] = weights
    if drafts:
        draft_model = str(one_layer_of(model))
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": draft_model,
            "num_speculative_tokens": drafts,
        }
    return EngineSide(name.replace(" ", "-"), Path(sys.executable), arguments, environment, WORKER, timeout_s=600)


def measure(dense: EngineSide, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the engines, and prints a line for each order and contender."""
    seconds, ready = dense.start()
    print(f"{ready['device']}, {describe_machine()}; {options.shape}, {options.layers or 'all'} layers")
    print(f"{'':<14}{'size':>10}{'wall ms':>9}{'dense':>8}{'ratio':>8}{'device ms':>11}{'dense':>8}{'ratio':>8}  steps")
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        for ratio in options.ratios:
            for kernels, dtype in product(options.implementations, options.summary_dtypes):
                name = " ".join([f"{method} {ratio:.0%}", *(word for word in (kernels, dtype) if word != "auto")])
                own = {"sparse_ratio": ratio, "implementation": kernels, "summary_dtype": dtype}
                own |= {"sparse_steps": "always"} if options.always else {}
                own |= {"summary": options.summary} if options.summary else {}
                ucm = {"ucm_sparse_method": method, "ucm_sparse_config": {method: own}}
                contender = side(name, ucm, model, options)
                try:
                    seconds, _ = contender.start()
                    for requests, context in options.sizes:
                        row = compare(dense, contender, requests, context, options)
                        rows.append({"name": name, "start_seconds": seconds, **row})
                        show(rows[-1])
                finally:
                    contender.stop()
            compare_tokens(rows, f"{method} {ratio:.0%}")
    for row in rows:
        for which in ("sparse", DENSE):
            kernels = row[which].get("kernels", [])
            if kernels and (which == "sparse" or row["name"] == rows[0]["name"]):
                shown = row["name"] if which == "sparse" else DENSE
                launches = f"{row[which]['launches']:.0f} launches a step"
                print(f"\n{shown}, {row['requests']} x {row['context']}: {launches}")
                for kernel, count, spent in kernels:
                    print(f"  {spent:>8.3f} ms {count:>6.0f} x  {kernel}")
    return rows


def compare_tokens(rows: Sequence[dict[str, Any]], name: str) -> None:
    """Prints how many answers of the implementations of block selection, and of dtypes of summaries, are the same."""
    for first in (row for row in rows if row["name"].startswith(name)):
        for other in (row for row in rows if row["name"].startswith(name)):
            same_order = (first["requests"], first["context"]) == (other["requests"], other["context"])
            if same_order and first["name"] < other["name"]:
                pairs = list(zip(first["sparse"]["output_tokens"], other["sparse"]["output_tokens"], strict=True))
                same = sum(a == b for a, b in pairs)
                print(f"  {first['name']} and {other['name']}: {same} of {len(pairs)} requests with the same tokens")


def compare(
    dense: EngineSide, contender: EngineSide, requests: int, context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the repeats, in turn."""
    order = {"requests": requests, "context": context, "steps": options.steps, "kernels": options.kernels}
    found: dict[str, list[dict[str, Any]]] = {DENSE: [], "sparse": []}
    for _ in range(options.repeats):
        for which, engine in ((DENSE, dense), ("sparse", contender)):
            found[which].append(engine.ask(order))
    row: dict[str, Any] = {"requests": requests, "context": context}
    return row | {which: medians(answers) for which, answers in found.items()}


def medians(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first answer, with the median of every number."""
    numbers = [key for key, value in answers[0].items() if isinstance(value, int | float)]
    return answers[0] | {key: statistics.median(answer[key] for answer in answers) for key in numbers}


def show(row: dict[str, Any]) -> None:
    line = f"{row['name']:<14}{row['requests']:>3}x{row['context']:<6}"
    for key, width in (("wall_ms", 9), ("device_ms", 11)):
        if key in row[DENSE]:
            ours, theirs = row["sparse"][key], row[DENSE][key]
            line += f"{ours:>{width}.3f}{theirs:>8.3f}{theirs / ours:>7.2f}x"
        else:
            line += f"{'-':>{width}}{'-':>8}{'-':>8}"
    answer = row["sparse"]
    print(f"{line}  {answer['dense_steps']:.0f} of {answer['steps']:.0f} dense", flush=True)


if __name__ == "__main__":
    sys.exit(main())
