"""The fitted model as a JSON file in the user's cache, valid for one device, its software and its number of threads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_gaudi_ucm.envs import user_cache
from vllm_gaudi_ucm.ops.native import matrix_unit
from vllm_gaudi_ucm.ops.native.build import cpu_features
from vllm_gaudi_ucm.ops.native.library import native
from vllm_gaudi_ucm.ops.private_folder import make_folders, refuse_foreign
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import NAMES, CostModel

SCHEMA = 1
MOST_BYTES = 1 << 20  # no model is as large; what is larger is not read


class ModelFileError(ValueError):
    """A file that holds no model for this device; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Facts:
    """What a fit is valid for.

    device: name of the CPU or the accelerator. torch: its version. kernels: key of the C++ kernels, and if they use the
    matrix unit, or "".
    threads: of torch, on a CPU; elsewhere 0. features: of the model, hashed: another version's fit is no fit.
    """

    device: str
    torch_version: str
    kernels: str
    threads: int
    features: str

    @classmethod
    def of(cls, device: torch.device, threads: int | None = None, matrix: bool = True) -> Facts:
        """Those of this process. threads: None for torch's own. matrix: False where its matrix unit shall rest."""
        on_cpu = device.type == "cpu"
        name = _cpu_name() if on_cpu else torch.get_device_module(device).get_device_name(device)
        return cls(
            name,
            torch.__version__,
            _kernels(matrix) if on_cpu else "",
            (threads or torch.get_num_threads()) if on_cpu else 0,
            _digest(" ".join(NAMES)),
        )

    def to_json(self) -> dict[str, str | int]:
        return {
            "device": self.device,
            "torch_version": self.torch_version,
            "kernels": self.kernels,
            "threads": self.threads,
            "features": self.features,
        }


def _kernels(matrix: bool) -> str:
    library = native()
    used = matrix and matrix_unit.in_use()
    return "" if library is None else Path(library._name).stem + ("+matrix" if used else "")


def default_path(facts: Facts, folder: Path | None = None) -> Path:
    """Where the fit of these facts lies; the file's name is a hash of them. folder: None for the user's cache.

    Raises RuntimeError where the user has no cache.
    """
    folder = folder or user_cache() / "attention"
    return folder / f"cost-{_digest(json.dumps(facts.to_json(), sort_keys=True))}.json"


def save_model(path: Path, model: CostModel, facts: Facts, report: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all; OSError where that is not possible. report: kept for people to read."""
    make_folders(path.parent)
    refuse_foreign(path.parent)
    content = {"schema": SCHEMA, "facts": facts.to_json(), "model": model.to_json(), "report": dict(report)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cost-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_model(path: Path, facts: Facts) -> CostModel:
    """The model of a file, made for these facts; FileNotFoundError, or ModelFileError for one that is not usable."""
    try:
        _refuse_others(path)
        text = path.read_bytes()[: MOST_BYTES + 1]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: {error}") from error
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes, which no fitted model has")
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"expected an object with schema {SCHEMA}")
        _compare(content.get("facts"), facts)
        return CostModel.from_json(content.get("model"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: {error}") from error


def _compare(found: object, facts: Facts) -> None:
    expected = facts.to_json()
    if not isinstance(found, dict):
        raise ValueError("it does not say what it was fitted on")
    for name, value in expected.items():
        if found.get(name) != value:
            raise ValueError(f"fitted for {name} {found.get(name)!r}, this is {value!r}")


def _refuse_others(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o002:
        raise PermissionError("it belongs to another user, or everybody may write to it")


def _cpu_name() -> str:
    """The CPU's model, and a hash of all that says what code is compiled for it."""
    features = cpu_features()
    names = [line.partition(":")[2].strip() for line in features.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({_digest(features)})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
