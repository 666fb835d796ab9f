"""`mark_step`: the cut between two recipes in lazy mode."""

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.state import state


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Launches what has accumulated. In a captured region it does nothing."""
    card.mark_steps += 1
    state.cut()
