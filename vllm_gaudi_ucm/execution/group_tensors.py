"""The tensors of a step for all KV-cache groups."""

from collections import Counter
from collections.abc import Sequence

from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInputs
from vllm_gaudi_ucm.execution.cache_group import CacheGroup
from vllm_gaudi_ucm.execution.step_tensors import StepTensor, input_tensors


def step_table(groups: Sequence[CacheGroup], inputs: RowInputs = BUILT_IN_INPUTS) -> tuple[StepTensor, ...]:
    """Returns the tensors of a step for these groups, for a model with these inputs.

    Raises:
        ValueError: an input or a group has a tensor with the name of another one.
    """
    of_groups = (entry for number, group in enumerate(groups) for entry in group.tensors(number))
    table = (*input_tensors(inputs), *of_groups)
    names = Counter(entry.name for entry in table)
    for entry in table:
        if names[entry.name] > 1:
            kind = "row input" if entry.is_input else "tensor of a cache group"
            raise ValueError(
                f"{kind} {entry.name!r}: found another tensor of a step with this name; choose another name"
            )
    return table
