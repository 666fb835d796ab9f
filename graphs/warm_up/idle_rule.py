"""Decides when the device has been idle for long enough to warm a graph."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IdleRule:
    """Starts a graph after the device has been idle for as long as the last graph of that kind took.

    A request that comes while a graph is being warmed waits for it, for at most about the time that the device had been
    idle before. How long a gap will last is unknown; waiting as long as the work takes is never worse than twice the
    best choice in hindsight (the rule for renting skis), and gaps between requests that have lasted are likely to
    continue. Between the steps of running requests there are milliseconds: `least` keeps these from being taken for a
    gap, even if graphs take less. `most` keeps graphs that take 14 s from waiting forever for a gap of their length on
    a server with a request every few seconds; only these can make a request wait longer than its gap.
    """

    least: float = 0.05
    most: float = 2.0

    def seconds_to_wait(self, last_seconds: float, idle_seconds: float) -> float:
        """Returns the seconds that the device must stay idle from now on; 0 means start.

        last_seconds: duration of the last graph of this kind. idle_seconds: time since the last step ended.
        """
        return max(0.0, min(max(last_seconds, self.least), self.most) - idle_seconds)


DEFAULT_RULE = IdleRule()
