"""Options of KVStar, beside which the options of its base method may stand. Source: seed 002 (KVStar), 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, unknown_key
from vllm_gaudi_ucm.sparse.factory import SparseMethodError, UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import MethodOptions


class KVStarOptions(MethodOptions):
    """Made by `resolve`, which checks the base method's options, too; they are kept as extra attributes."""

    model_config = ConfigDict(extra="allow")

    checkpoint_interval: Annotated[int, Field(ge=1)] = Field(
        default=8, description="Steps of a locked selection after which it is compared with a new one."
    )
    lock_duration: Annotated[int, Field(ge=1)] = Field(
        default=16, description="Steps of a lock, after which the selection is made anew in any case."
    )
    update_threshold: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="Blocks that a new selection may add and remove, together, without replacing the locked one.",
    )
    base_method: str = Field(
        default="GSA",
        description="Method that selects; its options stand beside these, or in its own section.",
    )

    def __hash__(self) -> int:
        return hash((*self.__dict__.values(), *sorted(self.given_base_options().items())))

    @classmethod
    def resolve(cls, value: Any, key: str) -> Self:
        """See MethodOptions. KVStar over KVStar is refused."""
        if isinstance(value, cls) or not isinstance(value, Mapping):
            return super().resolve(value, key)
        own = {name: item for name, item in value.items() if name in cls.model_fields}
        rest = {name: item for name, item in value.items() if name not in cls.model_fields}
        options, found = super().resolve({}, key), []
        try:
            options = super().resolve(own, key)
        except UcmConfigError as error:
            found += error.problems
        try:
            base = _resolve_base(own.get("base_method", "GSA"), rest, key, list(cls.model_fields))
        except UcmConfigError as error:
            raise UcmConfigError(found + [p for p in error.problems if p.key not in {q.key for q in found}]) from None
        if found:
            raise UcmConfigError(found)
        return options.model_copy(update={name: getattr(base, name) for name in rest})

    def given_base_options(self) -> dict[str, Any]:
        """The base method's options that stand beside KVStar's own."""
        return self.__pydantic_extra__ or {}

    def with_base_section(self, section: MethodOptions, key: str) -> Self:
        """These options over those in the base method's own section. Raises `UcmConfigError`."""
        beside = {name: getattr(section, name) for name in type(section).model_fields}
        return self.resolve({**self.__dict__, **beside, **self.given_base_options()}, key)

    def base_options(self) -> MethodOptions:
        """The options that the base method is created with."""
        return UcmSparseFactory.options_class(self.base_method).resolve(self.given_base_options(), "KVStar")


def _resolve_base(name: Any, given: dict[str, Any], key: str, own: list[str]) -> MethodOptions:
    """The base method's options in the keys that are not KVStar's `own`; found and named under KVStar's key."""
    others = [method for method in UcmSparseFactory.known_methods() if method != "KVStar"]
    wrong = Problem(f"{key}.base_method", repr(name), f"another method, one of {', '.join(others)}")
    if name not in others:
        raise UcmConfigError([wrong])
    try:
        options = UcmSparseFactory.options_class(name)
    except SparseMethodError as error:
        raise UcmConfigError([Problem(wrong.key, wrong.found, f"a method that can be loaded ({error})")]) from error
    known = list(options.model_fields)
    unknown = [unknown_key(str(option), key, [*own, *known]) for option in given if option not in known]
    if unknown:
        raise UcmConfigError(unknown)
    base = options.resolve(given, key)
    if getattr(base, "reuse_steps", 1) != 1:
        expected = "1, because KVStar's lock decides how long a selection serves"
        raise UcmConfigError([Problem(f"{key}.reuse_steps", repr(getattr(base, "reuse_steps", 1)), expected)])
    return base
