"""What importing the bridge does to a process: its threads see the card, and it must not be forked any more."""

import os
import threading
from collections.abc import Callable
from typing import Any

from habana_frameworks.torch.simulator.card_mode import CardOperatorMode
from habana_frameworks.torch.simulator.device_index import ONE_CARD
from habana_frameworks.torch.simulator.device_mode import DeviceMode
from habana_frameworks.torch.simulator.duties import duties


def enter_modes() -> None:
    """From now on this thread's tensors and operators are seen. There is no way back, as with the bridge."""
    CardOperatorMode().__enter__()
    DeviceMode().__enter__()


def enter_modes_in_threads() -> None:
    """Modes belong to a thread: every thread started from now on enters its own.

    It leaves them, too: torch releases those that are left when the system's thread is gone, which is after `join`
    returned, and a release while the interpreter ends aborts the process ("terminate called without an active
    exception").
    """
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def entered(self: threading.Thread) -> Any:
        with CardOperatorMode(), DeviceMode():
            return bootstrap(self)

    threading.Thread._bootstrap_inner = entered  # type: ignore[attr-defined]


def forbid_fork() -> None:
    """With the card a forked process hangs at its first operator; here fork raises. Spawning is what works."""
    for name in ("fork", "forkpty"):
        setattr(os, name, _refusing(getattr(os, name)))


def _refusing(fork: Callable[[], Any]) -> Callable[[], Any]:
    def refuse() -> Any:
        duties.refuse(
            ONE_CARD, "fork", "the device is started in this process, a forked one would hang", "spawn the process"
        )
        return fork()

    return refuse
