"""Base of every section of options."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, problems, section, shown


class Section(BaseModel):
    """Strict, immutable, equal by value; numbers are finite."""

    # strict: "512" for a number is a mistake in a file, not a number. An input may hold a password.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    earlier_names: ClassVar[Mapping[str, str]] = {}
    """Maps names that options had in the previous release to their names now. They still work, with a warning."""

    @classmethod
    def resolve(cls, value: Any, key: str) -> Self:
        """The options in the mapping under `key`, or options as they are; None is an empty section.

        Raises `UcmConfigError`.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            wanted = f"mapping with the keys {', '.join(cls.model_fields)}" if cls.model_fields else "an empty mapping"
            raise UcmConfigError([Problem(key, shown(value), wanted)])
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise UcmConfigError(list(problems(error, cls, key))) from None

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_meant(cls, values: Any) -> Any:
        """Corrects earlier names, an empty `graphs:`, and a bare `off`, which YAML 1.1 reads as false."""
        if not isinstance(values, Mapping):
            return values
        meant = {cls._name(key, values): cls._choice(key, value) for key, value in values.items()}
        return {key: value for key, value in meant.items() if value is not None or not cls._is_section(key)}

    @classmethod
    def _name(cls, key: Any, values: Mapping[Any, Any]) -> Any:
        """Returns the name of an option now. An earlier name next to the new one stays, and is refused as unknown."""
        name = cls.earlier_names.get(key, key)
        if name == key or name in values:
            return key
        warnings.warn(f"option {key} is now called {name}; the old name goes with the next release", FutureWarning, 2)
        return name

    @classmethod
    def _choice(cls, key: Any, value: Any) -> Any:
        field = cls.model_fields.get(key)
        if field is None or not isinstance(value, bool):
            return value
        word = "on" if value else "off"
        return word if word in _choices(field.annotation) else value

    @classmethod
    def _is_section(cls, key: Any) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and section(field) is not None


def _choices(annotation: Any) -> Iterator[Any]:
    """Returns the values of `Literal` in a type, even if it is one of several."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for member in get_args(annotation):
            yield from _choices(member)
