"""`gaudi-ucm calibrate`: measures the ranges of a model's layers on any device, for `--quantization inc`.

The files have the form of Intel Neural Compressor (INC): `maxabs_quant_<card>.json`, which `QUANT_CONFIG` names, and
the measured maxima in a folder next to it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm.envs import observed
from vllm_gaudi_ucm.layers.measured.measurements import CARDS, Calibration, Node, write_calibration
from vllm_gaudi_ucm_tools.calibration.engine import CalibrationEngine, CalibrationSettings
from vllm_gaudi_ucm_tools.calibration.observer import LayerObserver
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress

DTYPES = ("float32", "bfloat16", "float16")
BLOCKED = ("lm_head", "matmul_qk", "matmul_av", "softmax", "fused_scaled_dot_product_attention", "kv_b_proj")
"""Names that the configuration leaves out: modules of the vendor's plugin that are not measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model with plain weights")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="a prompt on each line: a text, or JSON with `prompt` or `prompt_token_ids`",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="gets a folder with the model's name"
    )
    parser.add_argument(
        "--card", choices=tuple(CARDS), default="g3", help="whose range scales shall have (default: %(default)s)"
    )
    parser.add_argument("--max-prompts", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=1024, metavar="N", help="longer ones are cut (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, otherwise bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured as JSON")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs, not only its errors")


def run(args: argparse.Namespace) -> int:
    """Measures, and writes the files; raises ValueError before the engine starts for options that cannot work."""
    check_output("--json", args.json)
    for option in ("--max-prompts", "--max-prompt-tokens", "--max-tokens"):
        found = getattr(args, option[2:].replace("-", "_"))
        if found < 1:
            raise ValueError(f"{option}: found {found}, expected at least 1")
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output}: it is a file; expected a folder, which may be new")
    if observed("QUANT_CONFIG"):
        raise ValueError("QUANT_CONFIG is set, which is for serving; unset it to measure")
    longest = _longest(args.model, args.max_tokens, args.max_prompt_tokens)
    prompts = _read_prompts(args.prompts, args.model, args.max_prompts, longest)
    device = detect_device()
    if device is None:
        raise ValueError("the plugin is not active here; `gaudi-ucm doctor` says why")
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    settings = CalibrationSettings(args.model, dtype, longest + args.max_tokens, "INFO" if args.verbose else "ERROR")
    nodes = _measure(settings, prompts, args.max_tokens)
    found = Calibration(args.output.resolve() / args.model.resolve().name.lower(), args.card, nodes, BLOCKED)
    path = write_calibration(found)
    tokens = sum(map(len, prompts))
    console = report_console()
    console.print(f"Measured {len(nodes)} modules on {len(prompts)} prompts of {tokens:,} tokens ({device}, {dtype}).")
    console.print(f"Serve with: QUANT_CONFIG={path} vllm serve {args.model} --quantization inc", soft_wrap=True)
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(path, nodes, len(prompts), tokens), indent=2) + "\n")
    return 0


def _measure(settings: CalibrationSettings, prompts: list[list[int]], max_tokens: int) -> dict[str, Node]:
    with task_progress("measuring") as progress, CalibrationEngine(settings) as engine:
        done = 0

        def on_answer() -> None:
            nonlocal done
            done += 1
            progress(done / len(prompts))

        # hooks come after the start, whose steps are filled with token 0
        with LayerObserver(engine.model) as observer:
            engine.answer(prompts, max_tokens, on_answer)
            return observer.nodes()


def _longest(model: Path, max_tokens: int, max_prompt_tokens: int) -> int:
    """Returns the tokens that a prompt may have."""
    if not (model / "config.json").is_file():
        raise ValueError(f"MODEL: {model} holds no config.json; expected the folder of a model in Hugging Face format")
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model)
    if config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"MODEL: {model} has quantised weights; expected plain ones: measure the model it was made of")
    most = config.get_text_config().max_position_embeddings
    if max_tokens >= most:
        raise ValueError(f"--max-tokens: found {max_tokens}, expected less than the model's {most} positions")
    return int(min(max_prompt_tokens, most - max_tokens))


def _read_prompts(file: Path, model: Path, max_prompts: int, longest: int) -> list[list[int]]:
    """Returns prompts as token ids. Raises ValueError that names the line."""
    if not file.is_file():
        raise ValueError(f"--prompts {file}: it is not a file; expected a prompt on each line")
    tokenizer: Any = None
    found: list[list[int]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip() or len(found) == max_prompts:
            continue
        prompt = _parse(line, f"--prompts {file}, line {number}")
        if isinstance(prompt, str):
            if tokenizer is None:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(model)
            prompt = tokenizer(prompt, verbose=False)["input_ids"]
        if prompt:
            found.append(prompt[:longest])
    if not found:
        raise ValueError(f"--prompts {file}: found no prompt, expected one on each line")
    return found


def _parse(line: str, place: str) -> str | list[int]:
    """Returns a text, or token ids."""
    if not line.lstrip().startswith("{"):
        return line
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: it begins like JSON, but is none ({error}); write the prompt as JSON") from error
    text, tokens = content.get("prompt"), content.get("prompt_token_ids")
    if isinstance(text, str):
        return text
    if isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens):
        return tokens
    raise ValueError(f"{place}: found no prompt, expected `prompt` with a text, or `prompt_token_ids` with numbers")


def _as_json(path: Path, nodes: dict[str, Node], prompts: int, tokens: int) -> dict[str, Any]:
    return {
        "quant_config": str(path),
        "prompts": prompts,
        "tokens": tokens,
        "modules": {name: node._asdict() for name, node in nodes.items()},
    }
