"""verl's DataProto."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.failing import refused
from trivium.frontdoors.verl import DataProto
from trivium.frontdoors.verl.objects.batches.protocol import RowsError, Tensors


def data(rows: int = 6) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows), "y": torch.arange(2.0 * rows).reshape(rows, 2)},
        {"name": [f"n{row}" for row in range(rows)]},
        {"step": 3},
    )


def test_rows_are_chosen_like_rows_of_an_array() -> None:
    rows = data()
    assert rows[1].batch["y"].tolist() == [2.0, 3.0]
    assert rows[-1].non_tensor_batch == {"name": "n5"}
    assert [row.batch["x"].item() for row in rows] == [*range(6)]
    chosen = {
        "slice": rows[1:5:2],
        "list": rows[[1, 3]],
        "mask": rows[[False, True, False, True, False, False]],
        "array": rows[np.array([1, 3])],
        "tensor": rows[torch.tensor([1, 3])],
    }
    for kind, part in chosen.items():
        assert part.batch["x"].tolist() == [1, 3], kind
        assert part.non_tensor_batch["name"].tolist() == ["n1", "n3"]
        assert part.batch.batch_size == torch.Size([2])
        assert part.meta_info == {"step": 3}
    with pytest.raises(IndexError):
        rows[6]
    with pytest.raises(TypeError):
        rows["x"]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("none", [[], (), range(0), np.array([]), torch.tensor([])])
def test_an_empty_selection_has_no_rows(none: Any) -> None:
    part = data()[none]
    assert len(part) == 0
    assert part.batch["y"].shape == (0, 2)
    assert part.non_tensor_batch["name"].tolist() == []
    assert data().batch[none]["x"].tolist() == []


def test_tensors_and_columns_have_one_entry_per_row() -> None:
    rows = data(2)
    assert pickle.loads(pickle.dumps(rows)).batch["y"].shape == (2, 2)
    with refused(RowsError, "'name'", 2, 3):
        DataProto(Tensors({"x": torch.zeros(2)}, [2]), {"name": np.zeros(3)})
    with refused(RowsError, "'x': 2", "'name': 3"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"name": ["a", "b", "c"]})
    with refused(RowsError, "(2, 1)"):
        DataProto(Tensors({"x": torch.zeros(2, 1)}, [2, 1]))
    with pytest.raises(AssertionError, match="'y'"):
        rows.batch["y"] = torch.zeros(3)
    assert len(DataProto()) == 0
    assert len(DataProto.from_dict(non_tensors={"name": ["a", "b"]})) == 2
