"""Environment variables that are written while the process runs: a value of the user must stay."""

import sys
from pathlib import Path

from habana_frameworks.torch.simulator.duties import duties

ENVIRONMENT = 38
WATCHED = frozenset(
    {
        "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS",
        "HABANA_VISIBLE_MODULES",
        "HLS_MODULE_ID",
        "PT_HPU_ENABLE_LAZY_COLLECTIVES",
        "PT_HPU_LAZY_MODE",
        "PT_HPU_RECIPE_CACHE_CONFIG",
        "PT_HPU_WEIGHT_SHARING",
        "RUNTIME_SCALE_PATCHING",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)


class Environment:
    """users: the watched variables as this process was started with. written: what the process has set since, in order.

    A variable that was set before the bridge was imported counts as written, too.
    """

    def __init__(self) -> None:
        pairs = (line.partition(b"=") for line in Path("/proc/self/environ").read_bytes().split(b"\0"))
        values = {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
        self.users = {name: value for name, value in values.items() if name in WATCHED}
        self.written: list[tuple[str, str]] = []

    def write(self, name: str, value: str) -> None:
        """A variable is about to be set. Raises HpuConstraintError where the user had set it to something else."""
        if name not in WATCHED:
            return
        users = self.users.get(name)
        if users is not None and users != value:
            found = f"{name}={value!r} over the user's {users!r}"
            duties.refuse(ENVIRONMENT, "os.environ", found, "leave it, or refuse to start with a text that names it")
        self.written.append((name, value))


environment = Environment()


def watch(current: dict[str, str]) -> None:
    """From now on writes are seen; `current`: the environment as it is, for what was written before."""
    for name in sorted(WATCHED & current.keys()):
        if environment.users.get(name) != current[name]:
            environment.write(name, current[name])
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.putenv":
        name, value = arguments
        assert isinstance(name, bytes)  # as os.environ encodes both
        assert isinstance(value, bytes)
        environment.write(name.decode(errors="replace"), value.decode(errors="replace"))
