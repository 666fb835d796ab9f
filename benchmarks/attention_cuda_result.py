"""The result of the attention benchmark on a GPU for a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

OURS = "ours"


@dataclass
class Result:
    """Milliseconds and relative errors by contender.

    goal: 0 if there is none. plan: time of the work done once per step. limit: time limit of this GPU.
    """

    name: str
    goal: float
    limit: float
    plan: float
    milliseconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        own = self.milliseconds[OURS]
        goal = f"goal {self.goal:.2f}, " if self.goal else ""
        others = (f"{name} {ms:.3f} ({ms / own:.2f}x)" for name, ms in self.milliseconds.items() if name != OURS)
        return (
            f"{self.name:<28} ours {own:.3f} ms, {goal}limit {self.limit:.3f} "
            f"({self.limit / own:.0%} reached), plan {self.plan:.3f}, error {self.errors[OURS]:.1e}; "
            + ", ".join(others)
        )
