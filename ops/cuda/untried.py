"""One switch for kernels that compile for a Hopper and are exact under Triton's interpreter, but ran on no GPU."""

# Until tests/ops/test_cuda_block_selection.py has passed on a GPU with True, torch computes there what these kernels
# would: block selection by sign codes, whose `expands_codes` in graphs/cost/specs.py is False then.
RAN_ON_A_GPU = False


def are_used() -> bool:
    """Returns whether these kernels are launched. Triton's interpreter runs them always."""
    from triton import knobs

    return RAN_ON_A_GPU or bool(knobs.runtime.interpret)
