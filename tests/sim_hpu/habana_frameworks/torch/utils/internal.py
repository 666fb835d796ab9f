"""`is_lazy`: the execution mode."""

from habana_frameworks.torch.simulator.state import is_lazy

__all__ = ["is_lazy"]
