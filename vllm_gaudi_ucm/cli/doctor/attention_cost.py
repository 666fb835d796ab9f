"""Doctor's row on the cost model of attention: whether a server would choose by what was measured on this device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import (
    FITTED_DEVICES,
    Facts,
    ModelFileError,
    default_path,
    load_model,
)

SECTION = "attention"
NAME = "ucm.attention.cost_model"
FIT = "`gaudi-ucm fit-attention` measures it, in some seconds"


def attention_cost_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """One row for a server on `device`."""
    option = config.attention.cost_model
    if option == "off" or device not in FITTED_DEVICES:
        why = "'off'" if option == "off" else f"{str(option)!r}: nothing to choose on {device}"
        yield Check(SECTION, NAME, "info", f"{why}; fixed rules")
        return
    facts = Facts.of(torch.device(device), config.cpu.threads, config.cpu.matrix_unit)
    path = option if isinstance(option, Path) else default_path(facts)
    try:
        load_model(path, facts)
    except FileNotFoundError:
        if isinstance(option, Path):
            yield Check(SECTION, NAME, "fail", f"{path} does not exist", "a fit for this device", f"{FIT}: -o {path}")
        else:
            yield Check(SECTION, NAME, "info", "'auto': no fit for this device; fixed rules", advice=FIT)
    except ModelFileError as error:
        status: Status = "fail" if isinstance(option, Path) else "warn"
        yield Check(SECTION, NAME, status, str(error), "a fit for this device", f"{FIT}; --force replaces the file")
    else:
        yield Check(SECTION, NAME, "ok", f"{str(option)!r}: fitted for {facts.device}, {path}")
