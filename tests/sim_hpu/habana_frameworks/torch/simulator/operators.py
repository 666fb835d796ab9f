"""The operators that a Gaudi is known to have and that our code reaches: everything else is not known to work there.

The list is `operators.txt`, one name a line, reviewed against the bridge's lists. SIM_HPU_RECORD_OPERATORS names a file
to which every operator that is not on the list is appended instead of being refused: so the list is made.
"""

import functools
import os
from pathlib import Path

from habana_frameworks.torch.simulator.duties import duties

from torch._ops import OpOverload

LIST = Path(__file__).with_name("operators.txt")
RECORD = "SIM_HPU_RECORD_OPERATORS"


def read_list() -> frozenset[str]:
    """Names as `aten::add`, for all overloads."""
    lines = (line.partition("#")[0].strip() for line in LIST.read_text().splitlines())
    return frozenset(line for line in lines if line)


_KNOWN = read_list()


def check_known(func: OpOverload) -> None:
    """Raises HpuConstraintError for an operator that is not on the list (duty 40)."""
    name = func._schema.name
    if name in _KNOWN or func.namespace == "sim_hpu" or not duties.on(40):
        return
    record = os.environ.get(RECORD, "")
    if record:
        _append(record, name)
        return
    remedy = f"if the bridge has it, add {name} to {LIST.name}; else compute it otherwise"
    duties.refuse(40, func, "not known on Gaudi", remedy)


@functools.cache
def _append(file: str, name: str) -> None:
    with open(file, "a") as lines:
        lines.write(name + "\n")
