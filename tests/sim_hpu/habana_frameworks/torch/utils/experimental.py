"""`_get_device_type`: the generation of the simulated card."""

import enum

from habana_frameworks.torch.simulator import card


class synDeviceType(enum.Enum):  # named as in the bridge
    """The generations that this plugin knows."""

    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return synDeviceType[card.device_type]
