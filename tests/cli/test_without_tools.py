"""`gaudi-ucm` without the package of developer tools, and with one of another release."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tests.architecture.sources import FOLDERS, ROOT, TOOLS
from vllm_gaudi_ucm import developer_tools
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.options.errors import UcmConfigError

INSTALL = "pip install 'vllm-gaudi-ucm[tools]'"


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(developer_tools, "DISTRIBUTION", "a-distribution-that-is-not-there")


def words_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize("name", cli.TOOLS)
def test_a_command_says_what_to_install(name: str, no_tools: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 2
    found = words_of(capsys)
    assert f"command {name} needs the package" in found
    assert INSTALL in found


@pytest.mark.usefixtures("no_tools")
def test_help_lists_what_is_there_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed, _, rest = capsys.readouterr().out.partition("Not installed:")
    assert all(re.search(rf"^ +{name} ", listed, re.M) for name in cli.COMMANDS)
    assert not any(re.search(rf"^ +{name} ", listed, re.M) for name in cli.TOOLS)
    named = re.sub(r"\s", "", rest)  # names are broken behind hyphens
    assert all(name in named for name in cli.TOOLS)


@pytest.mark.usefixtures("no_tools")
def test_other_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    assert "recipe_check" in capsys.readouterr().out


@pytest.mark.usefixtures("no_tools")
def test_an_option_of_a_server_says_what_to_install() -> None:
    with pytest.raises(UcmConfigError, match=r"ucm\.graphs\.recipe_check.*'count'.*vllm-gaudi-ucm\[tools\]"):
        UcmConfig.resolve({"graphs": {"recipe_check": "count"}}, "ucm")
    assert UcmConfig.resolve({"graphs": {"recipe_check": "off"}}, "ucm").graphs.recipe_check == "off"


@pytest.mark.usefixtures("no_tools")
def test_a_strategy_of_the_tools_says_what_to_install_or_to_use() -> None:
    with pytest.raises(UcmConfigError, match=r"ucm\.graphs\.strategy.*'trace'.*vllm-gaudi-ucm\[tools\]"):
        UcmConfig.resolve({"graphs": {"strategy": "trace", "trace": "phases.jsonl"}}, "ucm")
    with pytest.raises(UcmConfigError, match=r"ucm\.graphs\.trace.*`strategy` or `buckets`.*vllm-gaudi-ucm\[tools\]"):
        UcmConfig.resolve({"graphs": {"trace": "phases.jsonl"}}, "ucm")
    served: list[dict[str, str]] = [{"strategy": "padding_aware"}, {"buckets": "buckets.yaml"}]
    for options in served:
        config = UcmConfig.resolve({"graphs": {"trace": "phases.jsonl", **options}}, "ucm")
        assert str(config.graphs.trace) == "phases.jsonl"


def test_tools_of_another_release_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"vllm-gaudi-ucm": "1.2.3", developer_tools.DISTRIBUTION: "1.2.2"}
    monkeypatch.setattr(developer_tools, "version", lambda name: versions.get(name) or version(name))
    assert cli.main(["fetch-model"]) == 2
    assert "found vllm-gaudi-ucm-tools 1.2.2, expected 1.2.3" in words_of(capsys)


def test_versions_between_releases_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-gaudi-ucm": "1.2.4.dev7+gabc", developer_tools.DISTRIBUTION: "1.2.4.dev5"}
    monkeypatch.setattr(developer_tools, "version", versions.__getitem__)
    developer_tools.check_release()


def test_no_code_of_the_server_names_a_module_of_the_tools() -> None:
    """So the folder can be taken away: imports, in functions too, and names that are imported late."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    assert not [str(file) for file in files if TOOLS in file.read_text(encoding="utf-8")]
