"""The shapes of a server with fewer graphs than a grid needs: first those that keep decodes out of prompts' graphs."""

from collections.abc import Iterable

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits


def few_shapes(coarsest: BucketSet, sparse: Iterable[ForwardShape], most: int) -> list[ForwardShape]:
    """Returns at most `most` shapes in addition to the configured maximum, the most urgent ones.

    A decode in a graph of a prompt computes a prompt's rows, which costs more than a sparse method saves.

    Args:
        coarsest: one size along each axis.
        sparse: shapes of decodes with chosen blocks, with the blocks that are always attended.
    """
    limits = coarsest.limits
    any_decode = decodes_of_all_kinds(limits)
    urgent = [any_decode, *sparse, limits.phase_maximum(False, False, True), any_decode.with_selected(0)]
    rest = sorted(coarsest.forward, key=lambda shape: (shape.phase != "c--", "c" in shape.phase, shape.selected_blocks))
    maximum = limits.maximum.forward
    return [shape for shape in dict.fromkeys([*urgent, *rest]) if shape != maximum][: max(0, most)]


def decodes_of_all_kinds(limits: Limits) -> ForwardShape:
    """Returns the shape for any step whose requests have one row each, with chosen blocks or without."""
    shared = limits.max_decode_rows > 1
    return limits.phase_maximum(False, shared, True, selected=True)


def lacks_sparse_decodes(buckets: BucketSet) -> bool:
    """True if decodes with chosen blocks may have to run in graphs of prompts, while dense decodes have some of their
    own."""
    limits = buckets.limits
    if not limits.max_selected_blocks or all("c" in shape.phase for shape in buckets.forward):
        return False
    return "c" in buckets.lookup(decodes_of_all_kinds(limits).step(1)).phase
