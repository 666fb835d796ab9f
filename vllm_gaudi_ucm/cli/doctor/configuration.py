"""Doctor's section on the configuration: every problem of the one given, or its values."""

import json
from collections.abc import Iterator
from typing import Any

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.options.files import parse_json

SECTION = "configuration"


def resolve_text(text: str | None) -> UcmConfig:
    """The configuration in `--config`: JSON text, else a path, as the value of `ucm`; None: all defaults."""
    if text is None:
        return UcmConfig()
    return resolve_value(parse_json(text) if text.lstrip().startswith("{") else text)


def configuration_checks(text: str | None) -> Iterator[Check]:
    """The section's rows."""
    try:
        device = envs.device_choice()
        yield Check(SECTION, envs.DEVICE, "info", device, ", ".join(envs.DEVICE_CHOICES))
    except ValueError as error:
        yield Check(SECTION, envs.DEVICE, "fail", str(error), ", ".join(envs.DEVICE_CHOICES), "correct or unset it")
    try:
        config = resolve_text(text)
    except UcmConfigError as error:
        for problem in error.problems:
            yield Check(SECTION, problem.key, "fail", problem.found, problem.expected, f"correct it{error.source}")
        return
    yield Check(SECTION, "ucm", "ok", ", ".join(_flat(config.to_dict())))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`attention.causal_slice=512`, one for each value."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
