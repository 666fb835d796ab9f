"""`torch.hpu.random` of the simulated card."""

from habana_frameworks.torch.simulator import card


def manual_seed_all(seed: int) -> None:
    """Remembers the seed."""
    card.seeds.append(seed)
