"""What the simulator enforces, by number: which duties are on, how hard they are, and how often each was broken.

A duty either refuses (raises), warns (counts, and logs once), or spoils: it then makes the wrong value that the card
would make ("hostile", the default), or raises ("strict"). The numbers are those of the list of duties of a simulator.

SIM_HPU_SEVERITY: `hostile` or `strict`. SIM_HPU_DUTIES_OFF: numbers separated by commas.
SIM_HPU_PAD_ROWS: how many of the last rows of a tensor may be written twice, as pads (1); row 0 always may.
SIM_HPU_MINUS_ONE: 1 takes the index -1 for a pad where vllm-gaudi relies on it.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

from habana_frameworks.torch.simulator.constraint import HpuConstraintError

SEVERITY = "SIM_HPU_SEVERITY"
OFF = "SIM_HPU_DUTIES_OFF"
PAD_ROWS = "SIM_HPU_PAD_ROWS"
MINUS_ONE = "SIM_HPU_MINUS_ONE"
Severity = Literal["hostile", "strict"]

logger = logging.getLogger(__name__)


class Duties:
    """Of the whole process; a test may set both fields.

    severity: of the duties that spoil. off: numbers of duties that are not enforced.
    pad_rows: how many of the last rows are pads. minus_one: whether an index of -1 is a pad.
    counts: how often a duty was broken without an error, by (duty, operator).
    """

    def __init__(self) -> None:
        self.severity: Severity = "hostile"
        self.off: set[int] = set()
        self.pad_rows = 1
        self.minus_one = False
        self.counts: Counter[tuple[int, str]] = Counter()
        self.reset()

    def reset(self) -> None:
        """Back to what the environment says, with nothing counted. Raises ValueError for an environment of no sense."""
        severity, off = os.environ.get(SEVERITY, "hostile"), os.environ.get(OFF, "")
        if severity not in ("hostile", "strict"):
            raise ValueError(f"{SEVERITY}: found {severity!r}, expected 'hostile' or 'strict'")
        if not all(number.strip().isdigit() for number in off.split(",") if number):
            raise ValueError(f"{OFF}: found {off!r}, expected numbers of duties, such as '14,16'")
        self.severity = cast(Severity, severity)
        self.off = {int(number) for number in off.split(",") if number}
        self.pad_rows = int(os.environ.get(PAD_ROWS, "1"))
        self.minus_one = os.environ.get(MINUS_ONE, "0") != "0"
        self.counts.clear()

    def on(self, duty: int) -> bool:
        """Whether a duty is enforced."""
        return duty not in self.off

    def count(self, duty: int) -> int:
        """How often a duty was broken without an error."""
        return sum(number for (broken, _), number in self.counts.items() if broken == duty)

    def refuse(self, duty: int, operator: object, finding: str, remedy: str = "") -> None:
        """Raises HpuConstraintError, unless the duty is off."""
        if self.on(duty):
            raise HpuConstraintError(operator, finding, duty, remedy)

    def warn(self, duty: int, operator: object, finding: str, remedy: str = "") -> None:
        """Counts, and logs the first time for this operator."""
        if not self.on(duty):
            return
        self.counts[duty, str(operator)] += 1
        if self.counts[duty, str(operator)] == 1:
            logger.warning("%s", HpuConstraintError(operator, finding, duty, remedy))

    def spoils(self, duty: int, operator: object, finding: str, remedy: str = "") -> bool:
        """Whether the caller is to compute the wrong value. Raises HpuConstraintError where duties are strict."""
        if not self.on(duty):
            return False
        if self.severity == "strict":
            raise HpuConstraintError(operator, finding, duty, remedy)
        self.warn(duty, operator, finding, remedy)
        return True

    @contextmanager
    def without(self, *numbers: int) -> Iterator[None]:
        """These duties are off for a while."""
        before, self.off = self.off, self.off | set(numbers)
        try:
            yield
        finally:
            self.off = before


duties = Duties()
