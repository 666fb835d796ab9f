"""`QUANT_CONFIG`: the JSON file that says how Intel Neural Compressor (INC) quantises a model by measured ranges.

The keys are INC's. A key that would change numbers in a way that no layer here computes is refused by its name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from vllm_gaudi_ucm.options.errors import shown

Rounding = Literal["hardware", "power of two", "none", "unit", "single"]


class ScaleMethod(NamedTuple):
    """How scales are made of maxima.

    by_channel: each output of a weight has its own scale. backoffs: the parts of the range that the largest rows and
        weights may use.
    """

    name: str
    rows: Rounding
    weights: Rounding
    by_channel: bool = False
    rows_backoff: float = 0.25
    weights_backoff: float = 0.5

    @property
    def needs_maxima(self) -> bool:
        return self.rows not in ("unit", "single")


SCALE_METHODS = {
    method.name: method
    for method in (
        ScaleMethod("UNIT_SCALE", "unit", "unit"),
        ScaleMethod("HW_ALIGNED_SINGLE_SCALE", "single", "single"),
        ScaleMethod("MAXABS_HW", "hardware", "hardware"),
        ScaleMethod("MAXABS_POW2", "power of two", "power of two"),
        ScaleMethod("MAXABS_ARBITRARY", "none", "none"),
        ScaleMethod("ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2", "hardware", "power of two", by_channel=True),
        ScaleMethod("ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2", "power of two", "power of two", by_channel=True),
    )
}
OBSERVERS = ("maxabs", "maxabs_per_channel")
DEVICES = ("GAUDI2", "GAUDI3")
_ALLOWED: dict[str, tuple[Any, str]] = {
    "mode": (("QUANTIZE", "LOAD"), "to measure ranges, run `gaudi-ucm calibrate`"),
    "method": (("HOOKS",), "leave it out"),
    "fp8_config": (("E4M3",), "weights and rows are e4m3"),
    "hp_dtype": (("BF16",), "scales are computed in bfloat16, as INC does by default"),
    "observer": (tuple(name.upper() for name in OBSERVERS), "measure with one of these"),
    "scale_format": (("CONST", "SCALAR"), "both mean the same numbers"),
    "device_for_scales": (DEVICES, "name the card whose range the scales have"),
    **dict.fromkeys(
        ("use_qdq", "fake_quant", "dynamic_quantization", "row_parallel_linear_allreduce_quantization"),
        ((False,), "rows are rounded by measured scales, once, before each product"),
    ),
    "ignore_modules_wo_measures": ((True, False), "it says whether modules without measurements stay as they are"),
    "mod_dict": (({},), "kinds of modules cannot be added"),
}
"""Keys with the values that mean the same here, and advice for others."""
_WITHOUT_EFFECT = (
    "calibration_sample_interval",
    "measure_exclude",
    "measure_on_hpu",
    "quantize_weight",
    "recalc_scales",
    "seperate_measure_files",
    "verbose",
)
"""Keys about how ranges are measured or files are named, which change no number of a measured model."""
_READ = ("scale_method", "scale_params", "dump_stats_path", "allowlist", "blocklist", "whitelist", "blacklist")


class QuantConfigError(ValueError):
    """A `QUANT_CONFIG`, or a file that it names, cannot be used. The message says which, and what to do."""


@dataclass(frozen=True)
class NameRules:
    """Which modules are quantised: regular expressions that are searched in names, and names of classes."""

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def match_name(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.names)


@dataclass(frozen=True)
class QuantConfig:
    """The content of a `QUANT_CONFIG`.

    prefix: the beginning of the names of files with measurements, as the file has it.
    device: GAUDI2 or GAUDI3, whose range the scales have; None: the device that serves.
    skips_unmeasured: modules without measurements stay in the model's dtype; otherwise they are an error.
    """

    path: Path
    prefix: str
    method: ScaleMethod
    observer: str = "maxabs"
    device: str | None = None
    allowed: NameRules = NameRules()
    blocked: NameRules = NameRules()
    skips_unmeasured: bool = False

    def covers(self, name: str, kind: str) -> bool:
        """Returns whether a module of this name and class is to be quantised."""
        if self.blocked.match_name(name) or kind in self.blocked.types:
            return False
        by_type = not self.allowed.types or kind in self.allowed.types
        return by_type and (not self.allowed.names or self.allowed.match_name(name))

    def refuse(self, key: str, found: object, expected: str, advice: str) -> NoReturn:
        raise_error(self.path, key, found, expected, advice)


def raise_error(path: Path, key: str, found: object, expected: str, advice: str) -> NoReturn:
    raise QuantConfigError(f"QUANT_CONFIG {path}: {key}: found {shown(found)}, expected {expected}; {advice}")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object. Raises QuantConfigError that names the file."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise QuantConfigError(
            f"{what} {path}: {error.strerror or error}; name a file that this user may read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise QuantConfigError(f"{what} {path}: it is not JSON ({error}); copy the file once more") from error
    if not isinstance(found, dict):
        raise QuantConfigError(f"{what} {path}: found {type(found).__name__}, expected a JSON object")
    return found


def read_quant_config(path: Path) -> QuantConfig:
    """Reads a `QUANT_CONFIG`. Raises QuantConfigError for a key or a value that is not supported."""
    content = read_json(path, "QUANT_CONFIG")
    if "manifest_version" in content:
        raise_error(
            path,
            "manifest_version",
            content["manifest_version"],
            "the keys of INC",
            "it is the manifest of a calibration; name the file maxabs_quant_<g2 or g3>.json in the folder above it",
        )
    for key, value in content.items():
        _check_key(path, key, value)
    method = _method(path, content)
    prefix = content.get("dump_stats_path", "stats")
    if not isinstance(prefix, str) or not prefix or "\0" in prefix:
        raise_error(path, "dump_stats_path", prefix, "the beginning of files' names", "take the calibration's own")
    device = content.get("device_for_scales")
    return QuantConfig(
        path,
        prefix,
        method,
        observer=str(content.get("observer", "maxabs")).lower(),
        device=None if device is None else str(device).upper(),
        allowed=_rules(path, content, "allowlist", "whitelist"),
        blocked=_rules(path, content, "blocklist", "blacklist"),
        skips_unmeasured=_as_read(content.get("ignore_modules_wo_measures", False)) is True,
    )


def _as_read(value: Any) -> Any:
    """Returns words in capitals, as INC reads them; its files write booleans as words, too."""
    if not isinstance(value, str):
        return value
    word = value.upper()
    return {"TRUE": True, "FALSE": False}.get(word, word)


def _check_key(path: Path, key: str, value: Any) -> None:
    if key in _READ or key in _WITHOUT_EFFECT:
        return
    if key not in _ALLOWED:
        known = ", ".join(sorted((*_READ, *_WITHOUT_EFFECT, *_ALLOWED)))
        raise_error(path, key, value, f"one of the keys {known}", "remove it, if the calibration does not need it")
    choices, advice = _ALLOWED[key]
    if key == "device_for_scales" and value is None:
        return
    if _as_read(value) not in choices:
        raise_error(path, key, value, " or ".join(str(choice) for choice in choices), advice)


def _method(path: Path, content: dict[str, Any]) -> ScaleMethod:
    given = content.get("scale_method", "MAXABS_HW")
    method = SCALE_METHODS.get(_as_read(given)) if isinstance(given, str) else None
    if method is None:
        choices = ", ".join(name.lower() for name in SCALE_METHODS)
        raise_error(path, "scale_method", given, f"one of {choices}", "take maxabs_hw, which needs no new measurement")
    parameters = content.get("scale_params", {})
    backoffs = {"input_backoff": method.rows_backoff, "weight_backoff": method.weights_backoff}
    if not isinstance(parameters, dict):
        raise_error(path, "scale_params", parameters, "an object with input_backoff and weight_backoff", "correct it")
    for key, value in parameters.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in backoffs or not is_number or not 0 < value <= 1:
            expected = "numbers above 0, at most 1, for input_backoff and weight_backoff"
            raise_error(path, f"scale_params.{key}", value, expected, "remove it, or correct it")
        backoffs[key] = float(value)
    return method._replace(rows_backoff=backoffs["input_backoff"], weights_backoff=backoffs["weight_backoff"])


def _rules(path: Path, content: dict[str, Any], *keys: str) -> NameRules:
    """Reads a list of modules by its newer or its older key."""
    given = [key for key in keys if key in content]
    if not given:
        return NameRules()
    if len(given) > 1:
        raise_error(path, given[1], content[given[1]], f"one of {' and '.join(keys)}", f"keep {keys[0]}")
    (key,) = given
    found = content[key]
    if not isinstance(found, dict) or not set(found) <= {"names", "types"}:
        raise_error(path, key, found, 'an object with "names" and "types"', "correct it")
    lists: dict[str, tuple[str, ...]] = {}
    for part, values in found.items():
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise_error(path, f"{key}.{part}", values, "a list of words", "correct it")
        lists[part] = tuple(values)
    for pattern in lists.get("names", ()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise_error(path, f"{key}.names", pattern, "a regular expression", f"correct it ({error})")
    return NameRules(**lists)
