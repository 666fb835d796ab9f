"""The error for everything that a Gaudi does not do, or that it would do wrongly without a word."""


class HpuConstraintError(RuntimeError):
    """An operator broke a constraint of the card.

    operator: its name, such as `aten.index_select.default`. finding: what is wrong, with the values found.
    """

    def __init__(self, operator: object, finding: str) -> None:
        super().__init__(f"{operator}: {finding}")
        self.operator = str(operator)
        self.finding = finding
