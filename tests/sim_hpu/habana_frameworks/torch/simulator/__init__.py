"""The simulated card, which the real bridge lacks: figures a test may set, counts of calls, constraints, duties."""

from habana_frameworks.torch.simulator.card import Card, card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import Duties, duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.step_agreement import begin_step

__all__ = ["Card", "Duties", "HpuConstraintError", "begin_step", "card", "duties", "garbage"]
