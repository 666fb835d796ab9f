"""What one recorded region was, and what to say about it when it is new."""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """The operators of a region.

    label: whose region it was. digest: 16 bytes, equal for regions that a device would compile to one recipe.
    operators: how many there were. first_at: text of each different operator -> position of its first occurrence.
    inputs: texts of the first tensors that came from outside.
    """

    label: str
    digest: bytes
    operators: int
    first_at: dict[str, int]
    inputs: tuple[str, ...]


class NewRecipe(NamedTuple):
    """A recipe that was first seen after warm-up.

    label, operators, inputs: as in `Recipe`.
    new_operators: the first few (position, text) of operators that no recipe before it has.
    new_operator_count: how many different ones those are; 0 means that known operators came in another order, or with
        another flow of data.
    """

    label: str
    operators: int
    inputs: tuple[str, ...]
    new_operators: tuple[tuple[int, str], ...]
    new_operator_count: int

    def __str__(self) -> str:
        what = f"recipe {self.label!r} of {self.operators} operators was first seen after warm-up"
        inputs = f"; its inputs begin with {', '.join(self.inputs) or 'none'}"
        if not self.new_operator_count:
            return f"{what}: each operator is known, but not in this order or with this flow of data{inputs}"
        named = "; ".join(f"operator {position}: {text}" for position, text in self.new_operators)
        return f"{what}: {self.new_operator_count} operators are new, first {named}{inputs}"
