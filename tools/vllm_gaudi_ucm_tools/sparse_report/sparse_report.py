"""`gaudi-ucm sparse-report`: dense attention against the sparse methods, on a text of one's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm_tools.output import check_output, task_progress
from vllm_gaudi_ucm_tools.sparse_report.cases import Case, check_length, make_cases
from vllm_gaudi_ucm_tools.sparse_report.engine import PROMPT_CHUNK, EngineSettings
from vllm_gaudi_ucm_tools.sparse_report.measurement import Measurement, measure, num_steps
from vllm_gaudi_ucm_tools.sparse_report.report import SparseReport, write_text

METHODS = ("GSA", "ESA", "KVStar")
RATIOS = (0.05, 0.1, 0.3)
BLOCK_SIZE = 128
"""The server's own default."""
MIN_ANSWER = 3
"""Tokens: one from the prompt, and the steps whose median is the decode speed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model (Hugging Face format)")
    parser.add_argument("text", type=Path, metavar="PROMPT_FILE", help="a long text, which is the prompt")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME", help=f"default: {' '.join(METHODS)}")
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        default=RATIOS,
        metavar="SHARE",
        help=f"parts of the blocks to attend (default: {' '.join(map(str, RATIOS))})",
    )
    parser.add_argument(
        "--summaries",
        nargs="+",
        choices=get_args(BlockOptions.model_fields["summary"].annotation),
        help="what is kept of a block to score it (default: each method's own)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="more options: a file with ucm_sparse_config")
    parser.add_argument("--min-tokens", type=int, metavar="N", help="shortest sparse context (default: the method's)")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of the answer (default: %(default)s)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer; a longer text is cut (default: all of the text that the model can take)",
    )
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure as JSON")
    parser.add_argument("-o", "--output", metavar="PREFIX", help="also write the tables (.txt) and a picture (.png)")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs, not only its errors")


def run(args: argparse.Namespace) -> int:
    """Measures every case, one engine after the other; raises ValueError before the first for options that cannot
    work.
    """
    _check_outputs(args)
    _check_sizes(args)
    cases = make_cases(args.methods, args.ratios, args.summaries, args.min_tokens, args.config)
    prompt, max_model_len = _read_prompt(args)
    check_length(cases, len(prompt), args.block_size, f"PROMPT_FILE {args.text}")
    device = detect_device()
    if device is None:
        raise ValueError("the plugin is not active here; `gaudi-ucm doctor` says why")
    level = "INFO" if args.verbose else "ERROR"
    settings = EngineSettings(args.model, device, max_model_len, args.block_size, level)
    rows = _measure_all(cases, settings, prompt, args.max_tokens)
    report = SparseReport(
        args.model.resolve().name, args.text.name, device, len(prompt), args.max_tokens, args.block_size, rows
    )
    report.write()
    _write_files(args, report)
    return 0


def _measure_all(cases: list[Case], settings: EngineSettings, prompt: list[int], max_tokens: int) -> list[Measurement]:
    whole, done, rows = num_steps(cases, len(prompt), max_tokens, PROMPT_CHUNK), 0, []
    with task_progress("measuring") as progress:

        def on_step() -> None:
            nonlocal done
            done += 1
            progress(min(done / whole, 1.0))

        for case in cases:
            rows.append(measure(case, settings, prompt, max_tokens, on_step))
    return rows


def _check_sizes(args: argparse.Namespace) -> None:
    least = {"--max-tokens": MIN_ANSWER, "--block-size": 1, "--max-model-len": args.max_tokens + 1}
    for option, minimum in least.items():
        found = getattr(args, option[2:].replace("-", "_"))
        if found is not None and found < minimum:
            raise ValueError(f"{option}: found {found}, expected at least {minimum}")


def _check_outputs(args: argparse.Namespace) -> None:
    """Before the first engine: minutes later would be late."""
    check_output("--json", args.json)
    if args.output is not None:
        for path in _output_files(args.output):
            check_output("-o", path)
        from vllm_gaudi_ucm_tools.sparse_report.report import figure_class

        figure_class()


def _output_files(prefix: str) -> tuple[Path, Path]:
    """Returns the files of the tables and the picture."""
    return Path(f"{prefix}.txt"), Path(f"{prefix}.png")


def _read_prompt(args: argparse.Namespace) -> tuple[list[int], int]:
    """Returns the token ids of the text, cut to fit, and the context length to serve with."""
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"MODEL: {args.model} holds no config.json; expected the folder of a model in Hugging Face format; "
            "`gaudi-ucm fetch-model` puts a small one in place"
        )
    if not args.text.is_file():
        raise ValueError(f"PROMPT_FILE: {args.text} is not a file; expected a long text, in UTF-8")
    from transformers import AutoConfig, AutoTokenizer

    most = AutoConfig.from_pretrained(args.model).get_text_config().max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > most:
        raise ValueError(f"--max-model-len: found {args.max_model_len}, expected at most the model's {most}")
    text = args.text.read_text(encoding="utf-8", errors="replace")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
    length = args.max_model_len or min(most, len(tokens) + args.max_tokens)
    return tokens[: length - args.max_tokens], length


def _write_files(args: argparse.Namespace, report: SparseReport) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if args.output is not None:
        from vllm_gaudi_ucm_tools.sparse_report.report import draw

        table, picture = _output_files(args.output)
        write_text(report, table)
        draw(report, picture)
        print(f"tables written to {table}, picture to {picture}")
