"""The error for everything that a Gaudi does not do, or that it would do wrongly without a word."""


class HpuConstraintError(RuntimeError):
    """An operator broke a constraint of the card.

    operator: its name, such as `aten.index_select.default`. finding: what is wrong, with the values found.
    duty: number of the rule that it breaks, None where it has none. remedy: what to do instead.
    """

    def __init__(self, operator: object, finding: str, duty: int | None = None, remedy: str = "") -> None:
        rule = "" if duty is None else f" (duty {duty}{': ' if remedy else ''}{remedy})"
        super().__init__(f"{operator}: {finding}{rule}")
        self.operator = str(operator)
        self.finding = finding
        self.duty = duty
        self.remedy = remedy


class MissingInEagerModeError(HpuConstraintError, AttributeError):
    """A name that exists in lazy mode alone: `hasattr` says no, a call says why."""
