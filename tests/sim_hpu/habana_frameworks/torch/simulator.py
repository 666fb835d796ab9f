"""State of the simulated card: figures a test may set, and counts of what was called."""

from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass
class Card:
    """The one simulated card. Figures are those of a Gaudi 3 until a test sets others."""

    device_type: str = "synDeviceGaudi3"
    device_count: int = 1
    free_bytes: int = 120 * GIB
    total_bytes: int = 128 * GIB
    synchronizations: int = 0
    seeds: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Back to the figures and counts at import."""
        self.__init__()  # type: ignore[misc]


card = Card()
