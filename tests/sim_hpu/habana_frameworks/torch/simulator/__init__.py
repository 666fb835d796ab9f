"""The simulated card, which the real bridge lacks: figures a test may set, counts of calls, constraints."""

from habana_frameworks.torch.simulator.card import Card, card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError

__all__ = ["Card", "HpuConstraintError", "card"]
