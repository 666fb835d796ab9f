"""Places that cannot be used end the start where the user reads it, before there is an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.platform.features import save_config, start

OURS = {"kv_connector": "UcmConnector", "kv_role": "kv_both", "kv_connector_module_path": "vllm_gaudi_ucm.connector"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_config(tmp_path / "llama", "LlamaForCausalLM", "llama")


def connector(path: Path) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    store = {"kind": "file", "path": str(path), "capacity": "1GiB"}
    return {
        "kv_transfer_config": KVTransferConfig(**OURS, kv_connector_extra_config={"store": store})  # type: ignore[arg-type]
    }


def memory_mode(path: Path) -> dict[str, Any]:
    store = {"kind": "file", "path": str(path), "capacity": "1GiB"}
    mode = {"enabled": True, "store": store}
    return {"additional_config": {"ucm": {"ucm_sparse_method": "GSA", "memory_mode": mode}}}


def phase_log(path: Path) -> dict[str, Any]:
    return {"additional_config": {"ucm": {"phase_log": str(path)}}}


@pytest.mark.parametrize("option", [connector, memory_mode])
def test_a_folder_that_is_no_stores(model: Path, tmp_path: Path, option: Any) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "letter.txt").touch()
    for path in (folder, folder / "letter.txt" / "store"):
        with pytest.raises(ValueError, match=r"store\.path") as raised:
            start(model, **option(path))
        assert str(path) in str(raised.value)
    assert [file.name for file in folder.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("option", [connector, memory_mode])
def test_a_new_folder_is_made(model: Path, tmp_path: Path, option: Any) -> None:
    start(model, **option(tmp_path / "store"))
    assert (tmp_path / "store").is_dir()


def test_a_phase_log_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in {".": "Is a directory", "file/x": "Not a directory", "none/x": "No such file"}.items():
        with pytest.raises(ValueError, match=rf"ucm\.phase_log: cannot write .*{why}"):
            start(model, **phase_log(tmp_path / name))
    start(model, **phase_log(tmp_path / "file"))
    start(model, **phase_log(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
