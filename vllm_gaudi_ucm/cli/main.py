"""Entry of `gaudi-ucm`: picks the command and loads only its module.

Exit codes: 0 done; 1 the command ran and found a problem (`doctor`, `config --check`); 2 wrong usage, or an error a
person can correct (configuration, versions, missing file or package), printed as one line; 130 interrupted.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from vllm_gaudi_ucm import __version__, developer_tools
from vllm_gaudi_ucm.printable import print_look_alikes

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """A command: its module offers `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS = {
    "doctor": Command(
        "vllm_gaudi_ucm.cli.doctor.doctor", "say whether this machine can serve through the plugin, or why not"
    ),
    "config": Command("vllm_gaudi_ucm.cli.config", "print the configuration table, or check a configuration file"),
}
"""Commands of the server's own package."""

TOOLS = {
    "plan": "show buckets, padding, memory and warm-up before paying for them",
    "tune": "choose the best buckets for a phase log",
    "warm": "fill the recipe cache of an engine before it serves, and exit",
    "phases": "summarise or draw a phase log",
    "calibrate": "measure the ranges of a model's layers, for --quantization inc",
    "store": "count, verify or clear stored KV blocks, or model a store for logged traffic",
    "first-hour": "probe this machine's device, and write a report that can be sent",
    "demo": "run a mixed load through a small model and show what happened",
    "fetch-model": "put the demo model in place",
    "trace": "write a phase log of synthetic traffic",
    "op-cost": "count what attention's operators cost on Gaudi, modelled",
    "sparse-report": "compare the sparse methods with dense, on a text",
    "plot": "draw the steps of a phase log and the buckets over them",
}
"""Commands of the package `vllm-gaudi-ucm-tools`, with descriptions, so that listing commands does not import them."""


class MissingModuleError(RuntimeError):
    """A module that a command needs is not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; the console script's entry point."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments
    print_look_alikes()
    try:
        try:
            args = build_parser(arguments).parse_args(arguments)
            return int(args.run(args))
        finally:
            # here, because errors of a full disk or a closed pipe at the interpreter's end cannot be caught
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if show_traceback:
            raise
        _leave_stdout()
        return EXIT_PROBLEM
    except _expected_errors() as error:
        if show_traceback:
            raise
        print(f"gaudi-ucm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def _leave_stdout() -> None:
    """Discards the remaining output after the reader has closed it (`| head`), which is not an error."""
    stdout = sys.__stdout__
    if stdout is not None and sys.stdout is stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of all commands, of which only the one in `arguments` is loaded and knows its options."""
    there = commands()
    absent = [name for name in TOOLS if name not in there]
    more = f"{', '.join(absent)} need the package {developer_tools.DISTRIBUTION}: pip install 'vllm-gaudi-ucm[tools]'"
    parser = argparse.ArgumentParser(
        prog="gaudi-ucm",
        description="Tools of the vLLM plugin vllm-gaudi-ucm.",
        epilog=f"Not installed: {more}" if absent else None,
    )
    parser.add_argument("--version", action="version", version=f"vllm-gaudi-ucm {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error arose, not only its message")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    if chosen in absent:
        raise developer_tools.missing_tools(f"command {chosen}")
    for name, command in there.items():
        subparser = subparsers.add_parser(name, help=command.help, description=sentence(command.help))
        if name == chosen:
            module = _load(name, command)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def commands() -> dict[str, Command]:
    found = developer_tools.installed_commands()
    known = {name: Command(found[name].module, text) for name, text in TOOLS.items() if name in found}
    return COMMANDS | known


def sentence(text: str) -> str:
    """A help text as a sentence; names keep their capitals."""
    return f"{text[:1].upper()}{text[1:]}."


def _load(name: str, command: Command) -> ModuleType:
    try:
        if name in TOOLS:
            developer_tools.check_release()
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name == command.module:
            advice = f"the module {command.module} is not part of this installation; reinstall vllm-gaudi-ucm"
        else:
            advice = f"the Python package {error.name} is missing; pip install 'vllm-gaudi-ucm[tools]' brings it"
        raise MissingModuleError(f"command {name}: {advice}") from error


def _expected_errors() -> tuple[type[Exception], ...]:
    # Imported late: `gaudi-ucm --version` and `--help` answer without it.
    from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
    from vllm_gaudi_ucm.vllm_api.versions import UnsupportedVersionError

    return (
        ValueError,
        OSError,
        MissingModuleError,
        developer_tools.MissingToolsError,
        UnsupportedVersionError,
        UnsupportedFeatureError,
    )


if __name__ == "__main__":
    sys.exit(main())
