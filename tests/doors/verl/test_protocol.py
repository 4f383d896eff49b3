"""verl's DataProto and metric utilities."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.failing import refused
from trivium.errors import DataError
from trivium.frontdoors.verl import (
    DataProto,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    process_validation_metrics,
    reduce_metrics,
    unfold_batch_dim,
    unpad_dataproto,
)
from trivium.frontdoors.verl.objects.batches.protocol import RowsError, Tensors, union_numpy_dict, union_tensor_dict


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
    chosen = {
        "slice": rows[1:5:2],
        "method": rows.slice(1, 5, 2),
        "list": rows[[1, 3]],
        "mask": rows.select_idxs([False, True, False, True, False, False]),
        "array": rows[np.array([1, 3])],
        "tensor": rows.select_idxs(torch.tensor([1, 3])),
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
    for part in (data()[none], data().select_idxs(none)):
        assert len(part) == 0
        assert part.batch["y"].shape == (0, 2)
        assert part.non_tensor_batch["name"].tolist() == []
    assert data().batch[none]["x"].tolist() == []


def test_repeat_interleaves_or_repeats_the_whole() -> None:
    rows = data(2)
    assert rows.repeat(2).non_tensor_batch["name"].tolist() == ["n0", "n0", "n1", "n1"]
    assert rows.repeat(2, interleave=False).batch["x"].tolist() == [0, 1, 0, 1]
    assert rows.sample_level_repeat([3, 1]).batch["x"].tolist() == [0, 0, 0, 1]


def test_chunks_and_splits_concatenate_to_the_whole() -> None:
    rows = data()
    for parts in (rows.chunk(3), rows.split(4)):
        whole = DataProto.concat(parts)
        assert whole.batch["y"].tolist() == rows.batch["y"].tolist()
        assert whole.non_tensor_batch["name"].tolist() == rows.non_tensor_batch["name"].tolist()
        assert whole.meta_info == {"step": 3}
    assert [len(part) for part in rows.split(4)] == [4, 2]
    with refused(RowsError, "pad_dataproto_to_divisor"):
        rows.chunk(4)
    rows.meta_info["_verl_auto_padding"] = True
    assert [len(part) for part in rows.chunk(4)] == [2, 2, 2, 0]


def test_padding_goes_round_and_is_taken_off_again() -> None:
    rows = data(2)
    padded, added = pad_dataproto_to_divisor(rows, 5)
    assert (padded.batch["x"].tolist(), added) == ([0, 1, 0, 1, 0], 3)
    assert unpad_dataproto(padded, added).batch["x"].tolist() == [0, 1]
    assert pad_dataproto_to_divisor(rows, 2) == (rows, 0)
    rows.padding(2, "first")
    assert rows.non_tensor_batch["name"].tolist() == ["n0", "n1", "n0", "n0"]


def test_select_pop_and_rename() -> None:
    rows = data()
    chosen = rows.select(batch_keys=["x"], non_tensor_batch_keys=[], meta_info_keys=["step"], deepcopy=True)
    assert (list(chosen.batch), chosen.non_tensor_batch, chosen.meta_info) == (["x"], {}, {"step": 3})
    chosen.meta_info["step"] = 4
    popped = rows.pop(["y"], ["name"])
    assert (list(popped.batch), list(popped.non_tensor_batch)) == (["y"], ["name"])
    assert (list(rows.batch), rows.non_tensor_batch, rows.meta_info) == (["x"], {}, {"step": 3})
    assert list(rows.rename("x", "z").batch) == ["z"]
    assert list(rows.rename(["z"], ["x"]).batch) == ["x"]
    with refused(RowsError, "nothing"):
        rows.pop(["nothing"])
    with refused(DataError, "['a', 'b']"):
        rows.rename(["x"], ["a", "b"])


def test_union_adds_what_is_new_and_refuses_what_differs() -> None:
    rows = data(2)
    same = DataProto.from_dict({"x": torch.arange(2), "z": torch.ones(2)}, {"other": [1, 2]}, {"epoch": 0})
    united = rows.union(same)
    assert united is rows
    assert set(rows.batch) == {"x", "y", "z"}
    assert rows.non_tensor_batch["other"].tolist() == [1, 2]
    assert rows.meta_info == {"step": 3, "epoch": 0}
    for other in (
        DataProto.from_dict({"x": torch.arange(2) + 1}),
        DataProto.from_dict({"w": torch.arange(3)}),
        DataProto.from_dict({"x": torch.arange(2)}, {"name": ["n0", "else"]}),
        DataProto.from_dict({"x": torch.arange(2)}, meta_info={"step": 4}),
    ):
        with pytest.raises(AssertionError):
            rows.union(other)
    nan = {"a": np.array([1.0, np.nan]), "b": np.array([float("nan"), "nan"], dtype=object)}
    assert set(union_numpy_dict(dict(nan), {name: values.copy() for name, values in nan.items()})) == {"a", "b"}
    with refused(RowsError, "'a'"):
        union_numpy_dict(dict(nan), {"a": np.array([np.nan, 1.0])})
    first = Tensors({"x": torch.zeros(2)}, [2])
    assert union_tensor_dict(first, Tensors({"y": torch.ones(2)}, [2])) is first


def test_concat_merges_metrics_and_refuses_other_information() -> None:
    def part(**information: Any) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=information)

    merged = DataProto.concat(
        [part(flag=True), part(metrics={"loss": 1.0}), part(metrics=[{"loss": 2.0}, {"kl": 3.0}])]
    )
    assert merged.meta_info == {"flag": True, "metrics": {"loss": [1.0, 2.0], "kl": [3.0]}}
    with refused(RowsError, "'flag'"):
        DataProto.concat([part(flag=1), part(flag=2)])
    with refused(RowsError, "['x']", "['y']"):
        DataProto.concat([part(), DataProto.from_dict({"y": torch.zeros(1)})])


def test_iterator_yields_every_row_of_every_epoch() -> None:
    rows = data()
    seen = [part.batch["x"].tolist() for part in rows.make_iterator(2, epochs=2)]
    assert seen == [[0, 1], [2, 3], [4, 5]] * 2
    shuffled = [
        [part.batch["x"].tolist() for part in rows.make_iterator(3, 1, seed=7, dataloader_kwargs={"shuffle": True})]
        for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1] != [[0, 1, 2], [3, 4, 5]]
    assert sorted(row for part in shuffled[0] for row in part) == list(range(6))
    with refused(RowsError, 4, "6 rows"):
        rows.make_iterator(4, 1)


def test_dimensions_fold_and_unfold() -> None:
    rows = data()
    folded = fold_batch_dim(rows, 3)
    assert folded.batch["y"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["name"].tolist() == [["n0", "n1"], ["n2", "n3"], ["n4", "n5"]]
    unfolded = unfold_batch_dim(folded)
    assert unfolded.batch["y"].tolist() == rows.batch["y"].tolist()
    assert unfolded.non_tensor_batch["name"].tolist() == rows.non_tensor_batch["name"].tolist()


def test_columns_are_cut_into_rows() -> None:
    tensors = {"x": torch.arange(8).view(2, 4), "y": torch.tensor([[1], [2]])}
    rows = DataProto.from_dict(tensors, {"name": ["a", "b"], "each": [["p", "q"], ["r", "s"]]}, {"step": 1})
    cut = rows.unfold_column_chunks(2, ["x", "each"])
    assert (cut.batch["x"].tolist(), cut.batch["y"].tolist()) == (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[1], [1], [2], [2]],
    )
    assert cut.non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert cut.non_tensor_batch["each"].tolist() == [["p"], ["q"], ["r"], ["s"]]
    assert cut.meta_info == {"step": 1}


def test_single_dict_and_moves() -> None:
    rows = DataProto.from_single_dict({"x": torch.zeros(2, 1), "name": np.array(["a", "b"], dtype=object)})
    assert rows.to("cpu").batch.device == torch.device("cpu")
    assert pickle.loads(pickle.dumps(rows)).batch["x"].shape == (2, 1)
    with refused(DataError, "{'x': 'list'}"):
        DataProto.from_single_dict({"x": [1, 2]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError):
        DataProto(Tensors({"x": torch.zeros(2)}, [2]), {"name": np.zeros(3)})
    with pytest.raises(AssertionError):
        rows.batch["y"] = torch.zeros(3)
    assert len(DataProto()) == 0
    assert len(DataProto.from_dict(non_tensors={"name": ["a", "b"]})) == 2


# --------------------------------------------------------------------------- metrics


def test_metrics_of_a_batch() -> None:
    batch = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[0.5, 1.0], [1.5, 0.0], [0.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 2.0], [6.0, 9.0], [9.0, 9.0]]),
            "returns": torch.tensor([[1.0, 3.0], [2.0, 9.0], [9.0, 9.0]]),
            "values": torch.tensor([[1.0, 2.0], [2.0, 9.0], [9.0, 9.0]]),
            "responses": torch.zeros(3, 2),
            "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]),
        },
        {"__num_turns__": [2, 4, 2]},
        {"global_token_num": [3, 3, 2]},
    )
    metrics = compute_data_metrics(batch)
    expected = {
        "critic/score/mean": 3.0,
        "critic/rewards/max": 1.5,
        "critic/advantages/mean": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/max": 2.0,
        "critic/vf_explained_var": 1 - (1 / 3) / (1 + 1e-5),
        "response_length/mean": 1.0,
        "response_length_non_aborted/mean": 1.5,
        "response_length/clip_ratio": 1 / 3,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/clip_ratio": 2 / 3,
        "num_turns/max": 4.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any("values" in name for name in compute_data_metrics(batch, use_critic=False))
    timing = compute_timing_metrics(batch, {"gen": 3.0, "update_actor": 4.0, "step": 8.0})
    assert timing["timing_per_token_ms/gen"] == 1000.0  # 3 tokens of responses
    assert timing["timing_per_token_ms/update_actor"] == 500.0  # 8 tokens
    assert timing["timing_s/step"] == 8.0
    assert compute_throughout_metrics(batch, {"step": 8.0}, n_gpus=2) == {
        "perf/total_num_tokens": 8,
        "perf/time_per_step": 8.0,
        "perf/throughput": 0.5,
    }
    with refused(DataError, "empty"):
        compute_data_metrics(batch[2:])


def test_lists_of_metrics_are_reduced_by_the_words_of_their_names() -> None:
    lists = {"loss": [1.0, 3.0], "loss/max": [1.0, 3.0], "min_reward": [2.0, 1.0], "timing/x": [1.0, 2.0], "none": []}
    reduced = reduce_metrics(lists)
    assert np.isnan(reduced.pop("none"))
    assert reduced == {"loss": 2.0, "loss/max": 3.0, "min_reward": 1.0, "timing/x": 1.5}


def test_validation_metrics_by_source_and_uid() -> None:
    infos = {"score": [1.0, 0.0, 0.5, 0.5], "pred": ["a", "b", "c", "c"]}
    result = process_validation_metrics(["s", "s", "s", "s"], ["u", "u", "v", "v"], infos)
    assert result["s"]["score"]["mean@2"] == 0.5
    assert result["s"]["score"]["best@2/mean"] == 0.75  # of 1 and 0.5, over both samples
    assert result["s"]["score"]["worst@2/mean"] == 0.25
    assert result["s"]["score"]["maj@2/mean"] == 0.5
    assert "pred" not in result["s"]
