"""One row of the doctor's report, and the guard that turns a crash of a check into such a row."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The subject of a check, what was found, what was expected, and the advice ("" for none)."""

    section: str
    name: str
    status: Status
    found: str
    expected: str = ""
    advice: str = ""


def guarded(section: str, checks: Callable[[], Iterable[Check]]) -> list[Check]:
    """Yields the rows of one section; an exception becomes its last row, so that the other sections are still shown."""
    rows: list[Check] = []
    try:
        for row in checks():
            rows.append(row)  # one by one: the rows before a crash are kept
    except Exception as error:
        logger.debug("the doctor's section %s raised", section, exc_info=True)
        found = f"{type(error).__name__}: {error}"
        rows.append(Check(section, "check itself", "fail", found, "no error", "report this with the whole output"))
    return rows
