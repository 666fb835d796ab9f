"""Numbers of things in sentences: `1 step`, `3,000 steps`."""


def counted(number: int, thing: str) -> str:
    """The number and the thing, as many as there are. thing: a noun whose plural ends in s."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
