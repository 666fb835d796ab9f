"""`mark_step`: the cut between two recipes in lazy mode, nothing else."""

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.state import is_lazy, state


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Launches what has accumulated. In a captured region, and in eager mode, it does nothing."""
    if is_lazy():
        card.mark_steps += 1
        state.cut()
