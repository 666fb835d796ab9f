"""Steps of another server, as one with given limits takes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.graphs.shapes import limits, steps
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, default_shared_blocks
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps, steps_within


@given(st.data(), limits(), limits())
def test_no_step_is_lost_and_blocks_fit(data: st.DataObject, there: Limits, here: Limits) -> None:
    seen = Steps.from_buckets(data.draw(st.lists(steps(there), max_size=12)))
    found = steps_within(seen, here)
    assert found.count == seen.count
    assert (found.forward[:, 2] <= here.most_shared_blocks).all()
    assert (found.forward[:, 3] <= here.max_unique_blocks).all()
    assert (found.selected <= here.max_selected_blocks).all()
    rows = [step.forward[:, 1] @ step.forward_counts for step in (seen, found)]
    assert rows[0] == rows[1]
    assert found.logits.tolist() == seen.logits.tolist()


@given(st.data(), limits())
def test_steps_within_the_limits_stay_as_they_are(data: st.DataObject, here: Limits) -> None:
    seen = Steps.from_buckets(data.draw(st.lists(steps(here), min_size=1, max_size=12)))
    found = steps_within(seen, here)
    expected = seen if here.bounds_prompt_tiles else seen.without_prompt_tiles()
    assert found.shapes.tolist() == expected.shapes.tolist()
    assert found.has_prompt_tiles <= here.bounds_prompt_tiles
    assert found.forward_counts.tolist() == expected.forward_counts.tolist()
    if found.count:
        check_steps(found, here)


def test_steps_that_become_equal_are_counted_together() -> None:
    here = Limits(64, 8, 256, 16, 100, contiguous=False, max_shared_blocks=default_shared_blocks(256, 16))
    seen = Steps.from_buckets(
        [Bucket("csu", 40, 60, 100, 2), Bucket("csu", 40, 33, 120, 2), Bucket("csu", 40, 32, 99, 2)]
    )
    found = steps_within(seen, here)
    assert (found.forward.tolist(), found.forward_counts.tolist()) == ([[1, 40, 32, 99]], [3])
