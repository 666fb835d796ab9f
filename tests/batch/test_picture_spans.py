"""Numbers of pictures whose rows see each other: of requests, and in the rows of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.multimodal.inputs import PlaceholderRange

from tests.batch.plans_of_rows import plan
from vllm_gaudi_ucm.batch.picture_spans import PictureSpans


def request(*places: PlaceholderRange) -> Any:
    return SimpleNamespace(mm_features=[SimpleNamespace(mm_position=place) for place in places])


def test_each_run_of_embeddings_of_each_request_has_its_number() -> None:
    spans = PictureSpans(4, 16)
    two_lines = torch.tensor([False, True, True, False, True, True])
    spans.add(1, request(PlaceholderRange(2, 6, is_embed=two_lines), PlaceholderRange(9, 2)))
    spans.add(2, request(PlaceholderRange(0, 3)))
    assert spans.kept[1].tolist() == [0, 0, 0, 1, 1, 0, 2, 2, 0, 3, 3, 0, 0, 0, 0, 0]
    step = plan([2, 0, 0], [7, 4, 3], [1, 2, 3])
    found = spans.of(step)
    of_request = [found[step.table_rows[step.row_requests] == row].tolist() for row in (1, 2, 3)]
    one, two, other = of_request[0][1], of_request[0][4], of_request[1][0]
    assert of_request == [[0, one, one, 0, two, two, 0], [other] * 3 + [0], [0] * 3]
    assert len({0, one, two, other}) == 4


def test_the_next_request_of_a_row_has_none() -> None:
    spans = PictureSpans(2, 16)
    spans.add(0, request(PlaceholderRange(2, 6)))
    spans.add(0, request())
    assert not spans.kept.any()
