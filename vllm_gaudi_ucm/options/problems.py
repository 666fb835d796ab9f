"""Turns pydantic's errors into problems that name our key, what was found, and what was expected in words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_gaudi_ucm.options.choice import NameOf
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, shown, unknown_key
from vllm_gaudi_ucm.options.hidden_text import shown_url

NOTE = "note"
"""Key of a field's `json_schema_extra` with words that `expected` adds to what it derives from the type."""


URL = "url"
"""Key of a field's `json_schema_extra`: its value may hold a password, and is shown accordingly."""


WORDS = "words"
"""Key of a field's `json_schema_extra` with words that stand in the place of those that `expected` would derive."""


def problems(error: ValidationError, model: type[BaseModel], key: str) -> Iterator[Problem]:
    """What `error` says of a value of `model` that stands under `key`, one problem for each key."""
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
    """One of pydantic's errors, named by our key: what lies beyond a leaf is pydantic's own (members of a union)."""
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
    """What a field takes, in words: `integer, 16 to 8192`, `one of "auto", "reference"`, `mapping`."""
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
