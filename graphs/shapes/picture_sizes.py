"""Sizes in tokens that pictures are padded to, so that their encoder has few shapes."""

FEWEST = 32
"""Tokens of the smallest size: smaller pictures take little time at it."""


def sizes_up_to(longest: int, unit: int = 1) -> list[int]:
    """Returns the sizes, ascending: the last one is `longest`, and each is about twice the one before.

    unit: sizes are rounded up to multiples of so many tokens.
    """
    found = [longest]
    while found[-1] > FEWEST:
        found.append(-(-found[-1] // 2))
    return sorted({-(-size // unit) * unit for size in found})
