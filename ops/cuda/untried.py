"""One switch for all kernels that compile for a Hopper and are exact under Triton's interpreter, but ran on no GPU."""

# Until tests/ops/test_cuda_states.py, tests/ops/test_rejection_sampling.py and tests/ops/test_cuda_block_selection.py have
# passed on a GPU with True, torch computes there what these kernels would: prompts of layers with a state, the
# verification of random drafts, and block selection by sign codes (`expands_codes` in graphs/cost/specs.py counts that).
RAN_ON_A_GPU = False


def are_used() -> bool:
    """Returns whether these kernels are launched. Triton's interpreter runs them always."""
    from triton import knobs

    return RAN_ON_A_GPU or bool(knobs.runtime.interpret)
