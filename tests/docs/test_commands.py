"""Every command of README, CONTRIBUTING and docs runs here or in a test that is named here, or says what it needs.

A new block runs as it is: `gaudi-ucm` truly, in a folder with a phase log, a bucket file and a store; the options of
`vllm serve` are read. A block that cannot run has `<!-- needs: gaudi|cuda|network|minutes -->` in the line above it;
its options are read, too.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.commands import ROOT, Block, blocks, make_targets, pages
from tests.store.redis_server import RedisServer, needs_redis
from tests.vllm_versions import make_arg_parser
from vllm_gaudi_ucm.cli.main import build_parser, commands
from vllm_gaudi_ucm.cli.main import main as gaudi_ucm
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.connector.transfer_config import ConnectorOptions
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

# Commands that a test of another room runs, with that test.
TESTED_BY = {
    "python examples/offline_batch.py": "tests/examples/test_examples.py",
    "python examples/openai_client.py": "tests/examples/test_examples.py",
    "python examples/tune_buckets.py": "tests/examples/test_examples.py",
    "python examples/own_sparse_method.py": "tests/examples/test_examples.py",
    "python examples/own_store.py": "tests/examples/test_examples.py",
    "python examples/two_engines.py": "tests/examples/test_examples.py",
}
# Synthetic traffic of full length takes longer than a test should.
SHORTER = {"trace": ("--steps", "300")}
# How the documentation names what a reader has.
A_MODEL = ("<model>", "MODEL", "SMALL_MODEL")
A_STORE = "/nvme/kv"
A_REDIS = "redis://127.0.0.1:6379/0"
ALL = [block for page in pages() for block in blocks(page)]


@cache
def vllm_parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def check_vllm_serve(arguments: list[str]) -> None:
    """vLLM's own parser takes the arguments, and ours the plugin's options in them."""
    parsed = vllm_parser().parse_args(arguments)
    resolve_config(parsed.additional_config or {})
    if parsed.kv_transfer_config is not None:
        transfer: Any = parsed.kv_transfer_config
        ConnectorOptions.resolve(transfer.kv_connector_extra_config, "kv_connector_extra_config")


def check_words(command: tuple[str, ...]) -> None:
    """The command exists, and takes these arguments."""
    program, *arguments = command
    if program == "gaudi-ucm":
        build_parser(arguments).parse_args(arguments)
    elif program == "vllm":
        assert arguments[0] == "serve"
        check_vllm_serve(arguments[1:])
    elif program == "make":
        assert {word for word in arguments if "=" not in word} <= make_targets()
    elif program == "python":
        assert (ROOT / arguments[0]).is_file() or _module(arguments)


def _module(arguments: list[str]) -> bool:
    return arguments[0] == "-m" and (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("block", ALL, ids=str)
def test_words_of_commands_are_right(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in block.commands:
        check_words(command)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phase logs of two engines of a server, and buckets tuned to the first."""
    folder = tmp_path_factory.mktemp("files")
    log, buckets = str(folder / "phases.jsonl"), str(folder / "buckets.yaml")
    assert gaudi_ucm(["trace", "--mix", "chat", "--steps", "300", "-o", log]) == 0
    assert gaudi_ucm(["tune", log, "--max-graphs", "12", "--gap", "1", "-o", buckets]) == 0
    shutil.copy(log, folder / "phases.1.jsonl")
    return folder


def described_traffic() -> str:
    """Returns the traffic that the page about vllm-gaudi has its reader save."""
    page = (ROOT / "docs" / "guides" / "vllm-gaudi.md").read_text(encoding="utf-8")
    return page.split("```json\n")[1].split("```")[0]


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of a page run: with the files that a reader of the page has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_GAUDI_UCM_DEVICE", "cpu")
    for file in files.iterdir():
        shutil.copy(file, tmp_path)
    options = {"kind": "file", "path": str(tmp_path / "kv")}
    store = open_store(resolve_store_options(options), block_bytes=4096)
    assert store.save(bytes(32), memoryview(bytes(4096)))
    store.close()
    (tmp_path / "store.yaml").write_text(yaml.safe_dump(options))
    (tmp_path / "traffic.json").write_text(described_traffic())
    return tmp_path


def run(command: tuple[str, ...], redis_url: str | None) -> None:
    """Runs a command to its end, which must be a good one."""
    words = [word.replace(A_STORE, str(Path.cwd() / "kv")).replace(A_REDIS, redis_url or A_REDIS) for word in command]
    if words[0] == "gaudi-ucm":
        assert gaudi_ucm([*words[1:], *SHORTER.get(words[1], ())]) == 0, " ".join(words)
    elif words[:2] == ["vllm", "serve"]:
        check_vllm_serve(words[2:])
    else:
        test = TESTED_BY.get(" ".join(words[:2]))
        assert test, f"{' '.join(words)}: no test runs it; mark its block `<!-- needs: ... -->`, or name the test"
        assert Path(words[1]).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [page for page in pages() if any(not block.needs for block in blocks(page))], ids=lambda page: page.name
)
def test_commands_run(page: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a reader runs them: in the order of the page, each on what those before it have written."""
    commands = [command for block in blocks(page) if not block.needs for command in block.commands]
    server = None
    if any(A_REDIS in command for command in commands):
        needs_redis()
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        for command in commands:
            run(command, server and server.url)
    finally:
        if server is not None:
            server.kill()


INLINE = re.compile(r"`((?:gaudi-ucm|make|python -m) [^`\n]+)`")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_named_in_sentences_exist(page: Path) -> None:
    """Their subcommand, options and targets; arguments may be left out."""
    for found in INLINE.findall(page.read_text(encoding="utf-8")):
        program, name, *rest = found.split()
        if program == "make":
            targets = [word for word in (name, *rest[:1]) if "=" not in word and word.islower()][:1]
            assert set(targets) <= make_targets(), found
        elif program == "python":
            assert _module([name, rest[0]]), found
        elif name not in ("COMMAND", "...") and not name.startswith("-"):
            assert name in commands(), found
            known = option_names(name)
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, found


@cache
def option_names(command: str) -> set[str]:
    """The options of a command and of its actions."""
    parsers = [build_parser([command])]
    names: set[str] = set()
    while parsers:
        for action in parsers.pop()._actions:
            names |= set(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += [parser for key, parser in action.choices.items() if hasattr(parser, "_actions")]
    return names
