"""Errors of a configuration, in words that name the key, what was found, and what was expected."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_gaudi_ucm.options.values import NameOf, hide_passwords, shown_url


@dataclass(frozen=True)
class Problem:
    """One key with a value that cannot be used. found: without the passwords of URLs."""

    key: str
    found: str
    expected: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", hide_passwords(self.found))

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}, expected {self.expected}"


class UcmConfigError(ValueError):
    """The configuration cannot be used; `problems` holds every reason."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source = hide_passwords(source)
        super().__init__(
            "; ".join([f"configuration of vllm-gaudi-ucm{source}: {problems[0]}", *map(str, problems[1:])])
        )

    @classmethod
    def malformed(cls, source: str, what: str, key: str = "ucm") -> "UcmConfigError":
        """Reports text for `key` that is neither YAML nor JSON: `what` tells where and why."""
        return cls([Problem(key, f"malformed {source} ({what})", "YAML, or JSON in a *.json file")])

    def __reduce__(self) -> tuple[type["UcmConfigError"], tuple[list[Problem], str]]:
        # vLLM hands errors from the engine's process to the front: the default would call us with the message.
        return type(self), (self.problems, self.source)


MOST_SHOWN = 200
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """A value as Python writes it, shortened if it is long; passwords are hidden before a cut can divide them."""
    text = hide_passwords(repr(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def unknown_key(key: str, section: str, valid: list[str]) -> Problem:
    """A key that does not exist in a section, with the nearest one that does."""
    prefix = f"{section}." if section else ""
    by_lower_case = {name.lower(): name for name in valid}
    nearest = difflib.get_close_matches(key.lower(), by_lower_case, n=1, cutoff=0.6)
    if nearest:
        hint = f"{prefix}{by_lower_case[nearest[0]]} (the nearest valid key)"
    else:
        hint = " or ".join(f"{prefix}{name}" for name in sorted(valid))
    return Problem(f"{prefix}{key[:MOST_SHOWN]}", "an unknown key", hint)


NOTE = "note"
"""Key of a field's `json_schema_extra` with words that `expected` adds to what it derives from the type."""


URL = "url"
"""Key of a field's `json_schema_extra`: its value may hold a password, and is shown accordingly."""


WORDS = "words"
"""Key of a field's `json_schema_extra` with words that replace what `expected` would derive."""


def problems(error: ValidationError, model: type[BaseModel], key: str) -> Iterator[Problem]:
    """Returns what `error` reports on the value of `model` under `key`, one problem for each key."""
    seen = set()
    for detail in error.errors(include_url=False):
        inner = detail.get("ctx", {}).get("error")
        found = inner.problems if isinstance(inner, UcmConfigError) else [_problem(detail, model, key)]
        # A union reports one error for each of its members; they are one problem.
        for problem in found:
            if problem.key not in seen:
                seen.add(problem.key)
                yield problem


def _problem(detail: Any, model: type[BaseModel], key: str) -> Problem:
    """Translates one of pydantic's errors, named by our key: parts beyond a leaf are members of a union."""
    location = detail["loc"]
    found = shown(detail["input"])
    for depth, part in enumerate(map(str, location), start=1):
        field = model.model_fields.get(part)
        if field is None:
            return unknown_key(part, key, list(model.model_fields))
        key = f"{key}.{part}"
        inner = section(field)
        if inner is None or depth == len(location):
            return Problem(key, shown_url(detail["input"]) if _is_url(field) else found, expected(field))
        model = inner
    return Problem(key, found, "a mapping")


def _is_url(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and URL in field.json_schema_extra


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, None for one that is a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def expected(field: FieldInfo) -> str:
    """Describes the values of a field: `integer, 16 to 8192`, `one of "auto", "reference"`, `mapping`."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and WORDS in extra:
        return str(extra[WORDS])
    words = " or ".join(_alternatives(field.annotation, field.metadata))
    return f"{words} ({extra[NOTE]})" if isinstance(extra, dict) and NOTE in extra else words


def _alternatives(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    if annotation is type(None):
        yield "null"
    elif annotation is bool:
        yield "true or false"
    elif annotation is Path:
        yield "path of a file"
    elif annotation is int:
        yield "integer" + _range(metadata)
    elif annotation is float:
        yield "number" + _range(metadata)
    elif annotation is str:
        names = next((item.names() for item in metadata if isinstance(item, NameOf)), None)
        yield "text" if names is None else f"one of {', '.join(map(json.dumps, names))}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield f"mapping with the keys {', '.join(annotation.model_fields)}"
    elif hasattr(annotation, "__metadata__"):  # Annotated[T, ...]
        inner, *extra = get_args(annotation)
        yield from _alternatives(inner, extra)
    elif get_origin(annotation) is Literal:
        values = [json.dumps(value) for value in get_args(annotation)]
        yield values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    elif get_origin(annotation) is tuple:
        yield f"list, each entry {next(_alternatives(get_args(annotation)[0], []))}"
    else:  # a union
        for member in get_args(annotation):
            yield from _alternatives(member, metadata)


def _range(metadata: list[Any]) -> str:
    """`, 16 to 8192` or `, above 0` from the bounds that pydantic keeps in `Field` or annotated-types objects."""
    bounds: dict[str, int] = {}
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            bounds.update({name: getattr(part, name) for name in ("ge", "le", "gt") if hasattr(part, name)})
    least, most, above = bounds.get("ge"), bounds.get("le"), bounds.get("gt")
    if least is not None and most is not None:
        return f", {least} to {most}"
    limits = [("above", above), ("at least", least), ("at most", most)]
    words = " and ".join(f"{word} {bound}" for word, bound in limits if bound is not None)
    return f", {words}" if words else ""


class UnsupportedFeatureError(NotImplementedError):
    """Raised for a feature that a flag or a model asks for and that this plugin does not have.

    Not a ValueError: pydantic, which runs our checks while it builds vLLM's configuration, would wrap one into a report
    of its own, and our sentence would not be the last line.
    """

    def __init__(self, feature: str, asked_by: str) -> None:
        remedy = "remove the flag" if asked_by.startswith("--") else "choose another model, or remove the flag"
        super().__init__(
            f"vllm-gaudi-ucm does not support {feature} (asked for by {asked_by}); {remedy}. "
            "docs/support.md lists what is supported."
        )
        self.feature = feature


class UnsupportedRequestError(ValueError):
    """Raised for a sampling parameter that would be ignored; the server returns it as the request's error."""

    def __init__(self, parameter: str) -> None:
        super().__init__(f"vllm-gaudi-ucm does not support the sampling parameter {parameter}; leave it out.")


def counted(number: int, thing: str) -> str:
    """The number and the thing, as many as there are. thing: a noun whose plural ends in s."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
