"""`gaudi-ucm fit-attention`: measures attention on this device and leaves what a server chooses by in the cache."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.cli.output_file import check_output
from vllm_gaudi_ucm.cli.task_progress import task_progress
from vllm_gaudi_ucm.ops.unified_attention.cost.devices import FITTED_DEVICES

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import Facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--device", choices=FITTED_DEVICES, default="cpu", help="where to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch on a CPU, as ucm.cpu.threads (default: torch's own choice)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="for ucm.attention.cost_model (default: the user's cache)"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="samples of each way")
    parser.add_argument("--force", action="store_true", help="measure again where there is a fit already")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """0; a fit that is there already is not made again without --force. Unusable options raise a ValueError."""
    for name in ("threads", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, expected at least 1")
    if args.threads is not None and args.device != "cpu":
        raise ValueError(f"--threads is {args.threads}: only with --device cpu")
    check_output("--output", args.output)
    # torch takes seconds, which --help and wrong options need not
    import torch

    from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import Facts, default_path

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda': torch finds no GPU; expected cpu")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    facts = Facts.of(device)
    path = args.output or default_path(facts)
    if not args.force and _is_there(path, facts):
        return _tell_existing(path, as_json=args.json)
    return _fit(args, device, facts, path)


def _fit(args: argparse.Namespace, device: torch.device, facts: Facts, path: Path) -> int:
    """Measures, writes the fit and shows it."""
    from vllm_gaudi_ucm.cli.fit_attention_report import FitReport, show
    from vllm_gaudi_ucm.ops.unified_attention.cost.fit import REPEATS, fit, measure
    from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import save_model

    with task_progress("measuring attention") as progress:
        measured = measure(device, progress, repeats=args.repeats or REPEATS)
    model = fit(measured)
    report = FitReport.of(model, measured, device.type)
    made = {"created": datetime.now(UTC).isoformat(timespec="seconds"), **report.summary()}
    save_model(path, model, facts, made)
    if args.json:
        print(json.dumps({"file": str(path), "facts": facts.to_json(), **made, "steps": report.to_json()}, indent=2))
    else:
        show(report)
        print(f"written to {path}")
    return 0


def _is_there(path: Path, facts: Facts) -> bool:
    from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import ModelFileError, load_model

    try:
        load_model(path, facts)
    except (FileNotFoundError, ModelFileError):
        return False
    return True


def _tell_existing(path: Path, *, as_json: bool) -> int:
    """What the fit said of itself when it was made."""
    content = json.loads(path.read_text())
    if as_json:
        print(json.dumps({"file": str(path), "facts": content["facts"], **content["report"]}, indent=2))
        return 0
    for key, value in content["report"].items():
        print(f"{key.replace('_', ' ')}: {value}")
    print(f"there is a fit for this device in {path}; --force measures again")
    return 0
