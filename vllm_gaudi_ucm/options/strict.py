"""The base of option sections: strict, immutable, and checked under the key that they stand under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.problems import problems


class StrictOptions(BaseModel):
    """Base of option sections: unknown keys and wrong types are errors; immutable, equal by value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def resolve(cls, value: Any, key: str) -> Self:
        """The options in a mapping that stands under `key`, or options as they are. Raises `UcmConfigError`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            wanted = f"mapping with the keys {', '.join(cls.model_fields)}" if cls.model_fields else "an empty mapping"
            raise UcmConfigError([Problem(key, repr(value), wanted)])
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise UcmConfigError(list(problems(error, cls, key))) from None
