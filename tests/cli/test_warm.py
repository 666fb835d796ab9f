"""`gaudi-ucm warm`: fills the recipe cache on the simulated card, and refuses what it cannot warm."""

from __future__ import annotations

import fcntl
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_process import run_on_card
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.cli import main as cli

SIZES = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--block-size", "16"]
SIZES += ["--kv-cache-memory-bytes", str(2 << 20), "--dtype", "float32"]
OPTIONS = {"ucm": {"graphs": {"max_graphs": 6}}}


@pytest.fixture(autouse=True)
def no_folder_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets no folder of recipes: torch names its own in the environment once it has used it."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "PT_HPU_RECIPE_CACHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def warm_twice(model: str, place: str) -> list[dict[str, Any]]:
    """Reports of the command: with two processes that lack the model's weights, and with one that has them."""
    from habana_frameworks.torch.simulator.recipes import recipes

    found = []
    for flags in (["--processes", "2", model, "--load-format", "dummy"], [model]):
        # as in a process that has just started
        recipes.forget()
        with redirect_stdout(io.StringIO()) as output:
            command = ["warm", "--recipe-cache", f"{place}/recipes", "--json", *flags, *SIZES]
            assert cli.main([*command, "--additional-config", json.dumps(OPTIONS)]) == 0
        found.append(json.loads(output.getvalue()))
    return found


@pytest.mark.slow  # starts four engines on the simulated card
def test_what_shares_have_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", make_config("llama"))
    first, again = run_on_card(warm_twice, tmp_path, model=str(model), place=str(tmp_path)).result
    shares = first["shares"]
    assert [share["graphs"]["failed"] for share in shares] == [0, 0]
    # the largest bucket is in both, and no share has all
    assert all(1 < share["graphs"]["warm"] < first["graphs"]["warm"] for share in shares)
    assert sum(share["graphs"]["warm"] - 1 for share in shares) + 1 >= first["graphs"]["warm"]
    # the first one compiles what all buckets have in common, and the last engine nothing
    assert shares[0]["compiled"] > shares[1]["compiled"] > 0
    assert first["compiled"] == 0
    # weights that are loaded may be one more, which dummy weights do not need
    assert again["files"] - again["files_before"] == again["compiled"] <= 1
    # each recipe has a file, also those that are compiled before the first bucket
    assert sum(share["compiled"] for share in shares) == first["files"] == again["files_before"]
    assert first["files_before"] == 0
    for report in (first, again):
        assert report["graphs"]["cold"] == report["graphs"]["failed"] == 0
    assert (again["device"], again["versions"]["habana-torch-plugin"][:5], again["shares"]) == ("hpu", "1.24.", [])
    assert (tmp_path / "recipes").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL: expected a model"),
        (["--processes", "0", "."], "--processes: found 0"),
        (["."], "--recipe-cache: not given"),
        (["--recipe-cache", "r", ".", "--data-parallel-size", "2"], "--data-parallel-size 2: warming several engines"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_two_commands_do_not_fill_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / ".r.warm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["warm", "--recipe-cache", str(tmp_path / "r"), "."]) == 2
    assert "another `gaudi-ucm warm` is filling it" in capsys.readouterr().err
