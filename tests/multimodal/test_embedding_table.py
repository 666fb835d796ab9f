"""The table of embeddings: pads of an item take none of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_gaudi_ucm.graphs.shapes.picture_sizes import sizes_up_to
from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable, TableFullError


def test_pads_are_not_kept() -> None:
    table = EmbeddingTable(5, 2, torch.float32, torch.device("cpu"))
    embeddings = torch.arange(2.0, 18.0).view(8, 2)
    table.put("padded", embeddings, 3)
    rows = table.rows_of("padded")
    assert rows is not None
    assert len(rows) == 3
    assert table.num_free == 2
    chosen = torch.from_numpy(np.array([rows[2], 0, rows[0]], np.int64))
    merged, _ = table.merged(torch.full((3, 2), -1.0), chosen)
    assert merged.tolist() == [embeddings[2].tolist(), [-1.0, -1.0], embeddings[0].tolist()]
    assert not table.values[0].any()
    table.put("whole", embeddings[:2])
    with pytest.raises(TableFullError):
        table.put("other", embeddings, 1)
    table.free("padded")
    assert table.num_free == 3


def test_sizes_of_pictures_double_up_to_the_largest() -> None:
    assert sizes_up_to(20) == [20]
    assert sizes_up_to(577) == [19, 37, 73, 145, 289, 577]
    assert sizes_up_to(16384)[0] == 32
    assert len(sizes_up_to(16384)) == 10
