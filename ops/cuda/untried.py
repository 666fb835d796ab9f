"""One switch for all kernels that compile for a Hopper and are exact under Triton's interpreter, but ran on no GPU."""

# Until test_cuda_states.py, test_rejection_sampling.py and test_cuda_block_selection.py in tests/ops have passed on a
# GPU with True, torch computes there what these kernels would: prompts of layers with a state, the verification of
# random drafts, and block selection by sign codes, whose `expands_codes` in graphs/cost/specs.py is False then.
RAN_ON_A_GPU = False


def are_used() -> bool:
    """Returns whether these kernels are launched. Triton's interpreter runs them always."""
    from triton import knobs

    return RAN_ON_A_GPU or bool(knobs.runtime.interpret)
