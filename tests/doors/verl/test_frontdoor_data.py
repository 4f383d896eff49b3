"""Rows of the RLHF schema as tasks, in the order of a sampler, as a function collates them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from tests.failing import refused
from trivium.foundation.errors import DataError
from trivium.frontdoors.padding import Truncation, cut_prompt
from trivium.frontdoors.verl.data import Data, read_files, rows_of, some_rows
from trivium.frontdoors.verl.objects.datasets.prompts import CutRenderer
from trivium.frontdoors.verl.objects.datasets.samplers import AbstractCurriculumSampler
from trivium.policy import PromptTooLong
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny import tiny_tokenizer
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Message, Prompt


def row(number: int, text: str | None = None) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": text or f"{number}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


ROWS = [row(number) for number in range(10)]


def data(rows: Any = ROWS, **more: Any) -> Data:
    return Data(rows, **({"taskset": "train", "origin": "the rows", "batch": 4} | more))


def visited(source: Data, epoch: int) -> list[int]:
    return [source.visit(epoch, place).columns["extra_info"]["index"] for place in range(source.epoch_length)]


def test_a_row_is_a_task_with_all_its_columns() -> None:
    task = data().visit(0, 3)
    assert (task.task_id, task.taskset, task.prompt) == ("3", "train", (Message("user", "3+1="),))
    assert task.columns == {key: value for key, value in ROWS[3].items() if key != "prompt"} | {"answer": "4"}


def test_an_epoch_is_whole_batches_and_shuffled_by_its_seed() -> None:
    plain, shuffled = data(), data(shuffle=True, seed=3)
    assert visited(plain, 0) == visited(plain, 5) == list(range(8))
    first, second = visited(shuffled, 0), visited(shuffled, 1)
    assert first != second
    assert len(set(first)) == len(set(second)) == 8
    assert visited(data(shuffle=True, seed=3), 1) == second


def test_the_schedule_follows_the_rows_own_order() -> None:
    source = data(shuffle=True)

    class Tasks:
        epoch_length = source.epoch_length
        visit = staticmethod(source.visit)

        def __len__(self) -> int:
            return source.epoch_length

        def __getitem__(self, index: int) -> Any:
            return source.visit(0, index)

    schedule = Schedule(Tasks(), seed=9, groups_per_step=4, steps=4)
    found = [schedule.at(slot) for slot in range(16)]
    assert [at.epoch for at in found] == [0] * 8 + [1] * 8
    assert [int(at.task.task_id) for at in found] == [*visited(source, 0), *visited(source, 1)]


def test_a_sampler_decides_the_order_and_a_resumed_run_goes_on_in_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = data(sampler=RandomSampler(ROWS), folder=tmp_path)  # no generator of its own: it will never repeat
    first, second = visited(before, 0), visited(before, 1)
    assert first != second != sorted(second)
    again = data(sampler=RandomSampler(ROWS), folder=tmp_path)
    assert visited(again, 1) == second
    assert visited(again, 0) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000000.json", "epoch-000001.json"]


def test_a_seeded_sampler_goes_on_where_it_would_have_been(tmp_path: Path) -> None:
    def sampler() -> RandomSampler:
        return RandomSampler(ROWS, generator=torch.Generator().manual_seed(5))

    whole, begun = data(sampler=sampler()), data(sampler=sampler(), folder=tmp_path)
    epochs = [visited(whole, epoch) for epoch in range(3)]
    assert visited(begun, 0) == epochs[0]
    assert visited(data(sampler=sampler(), folder=tmp_path), 2) == epochs[2]


def test_a_sampler_that_wants_to_know_the_epoch_is_told() -> None:
    sampler = DistributedSampler(ROWS, num_replicas=1, rank=0, seed=1)  # pyright: ignore[reportArgumentType]
    source = data(sampler=sampler)
    assert visited(source, 0) != visited(source, 1)
    assert sampler.epoch == 1


def test_what_an_epoch_visits_twice_is_another_task_each_time() -> None:
    sampler = WeightedRandomSampler([1.0, 1.0] + [0.0] * 8, num_samples=12)
    source = data(sampler=sampler, batch=4)
    ids = [source.visit(0, place).task_id for place in range(source.epoch_length)]
    assert len(ids) == len(set(ids)) == 12
    assert {task_id.partition("#")[0] for task_id in ids} == {"0", "1"}


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (Endless(), "__len__"),
        (BatchSampler(SequentialSampler(ROWS), 2, drop_last=True), "data.train_batch_size"),
        (torch.rand(8), "train_sampler"),
        ([0, 1, 2, 99], "99"),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "[0, 1]"),
        ([0, 1, 2], "3"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_refused(sampler: Any, name: str) -> None:
    with refused(DataError, name):
        data(sampler=sampler)  # not when the first batch is drawn


def test_tensors_are_positions_too() -> None:
    assert visited(data(sampler=torch.randperm(8, generator=torch.Generator().manual_seed(1))), 0) == [
        int(place) for place in torch.randperm(8, generator=torch.Generator().manual_seed(1))
    ]


class Curriculum(AbstractCurriculumSampler):
    """Visits the rows with the lowest rewards next. Its state is complete."""

    def __init__(self, data_source: Any, data_config: Any = None) -> None:
        self.rewards, self.left = [0.0] * len(data_source), list[int]()

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[int]:
        if not self.left:
            self.left = list(range(len(self.rewards)))
        while self.left:
            place = min(self.left, key=lambda place: (self.rewards[place], place))
            self.left.remove(place)
            yield place

    def update(self, batch: Any) -> None:
        for rank, place in enumerate(batch):
            self.rewards[place] += (place * place + 3 * rank + round(self.rewards[place])) % 7

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": torch.tensor(self.rewards), "left": np.array(self.left, np.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["rewards"], torch.Tensor)
        assert isinstance(state["left"], np.ndarray)
        self.rewards, self.left = state["rewards"].tolist(), state["left"].tolist()


def test_a_sampler_that_learns_is_drawn_from_batch_by_batch_and_resumes(tmp_path: Path) -> None:
    def steps(source: Data, numbers: range) -> list[list[int]]:
        batches: list[list[int]] = []
        for number in numbers:
            epoch, first = divmod(4 * number, source.epoch_length)
            batches.append([int(source.visit(epoch, first + place).task_id) for place in range(4)])
            source.orders.update(batches[-1])
        return batches

    rows = [row(number) for number in range(8)]
    whole = steps(data(rows, sampler=Curriculum(rows)), range(7))
    assert whole[:2] != whole[2:4] != whole[4:6]  # what it learned counts
    for saved in range(1, 6):
        for ahead in (0, 1):  # a killed run may have drawn a batch that it did not learn from
            folder = tmp_path / f"{saved}-{ahead}"
            before = data(rows, sampler=Curriculum(rows), folder=folder)
            steps(before, range(saved))
            state = json.loads(json.dumps(before.orders.state()))
            if ahead:
                before.visit(*divmod(4 * saved, before.epoch_length))
            after = data(rows, sampler=Curriculum(rows), folder=folder)
            after.orders.restore(state)
            assert steps(after, range(saved, 7)) == whole[saved:], (saved, ahead)


def test_a_sampler_that_learned_and_forgets_does_not_resume() -> None:
    class Forgetful(list[int]):
        def update(self, batch: Any) -> None: ...

    source = data(sampler=Forgetful(range(8)))
    source.visit(0, 0)
    source.orders.update(None)
    with refused(DataError, "Forgetful", "state_dict", "load_state_dict"):
        data(sampler=Forgetful(range(8))).orders.restore(source.orders.state())


def test_the_collate_of_torch_is_refused_before_anything_starts() -> None:
    with refused(DataError, "collate_fn"):
        data(collate_fn=default_collate)
    flat = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    assert data(flat, collate_fn=default_collate).visit(0, 5).prompt == (Message("user", "5+1="),)


def test_collate_makes_the_rows_of_a_batch() -> None:
    seen: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(len(rows))
        return {
            "prompt": np.array([r["prompt"] for r in rows], dtype=object),
            "weight": torch.arange(len(rows), dtype=torch.float32) / len(rows),
            "data_source": ["collated"] * len(rows),
        }

    source = data(collate_fn=collate)
    tasks = [source.visit(0, place) for place in range(8)]
    assert [task.columns["weight"] for task in tasks] == [0.0, 0.25, 0.5, 0.75] * 2
    assert tasks[5].prompt[0].content == "5+1="
    assert tasks[5].columns["data_source"] == "collated"
    assert seen == [4, 4, 4]  # once to see that it can, in the constructor


@pytest.mark.parametrize(
    ("collate", "name"),
    [
        (lambda rows: {"prompt": [rows[0]["prompt"]]}, "'prompt'"),
        (lambda rows: {"text": [r["prompt"] for r in rows]}, "data.prompt_key"),
        (lambda rows: {"prompt": "all of them"}, "'prompt'"),
    ],
)
def test_a_collate_that_loses_rows_or_prompts_is_refused(collate: Any, name: str) -> None:
    with refused(DataError, name):
        data(collate_fn=collate).visit(0, 0)


class Torch(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": np.array(ROWS[index]["prompt"], dtype=object), "index": torch.tensor(index)}


def test_a_torch_dataset_and_tensors_in_its_rows() -> None:
    task = data(rows_of(Torch(), "train_dataset"), batch=5).visit(0, 2)
    assert (task.prompt[0].content, task.columns) == ("2+1=", {"index": 2})
    with refused(DataError, "train_dataset", "__getitem__"):
        rows_of(iter(ROWS), "train_dataset")


def test_files_one_after_the_other(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[:6]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(r) for r in ROWS[6:]))
    rows = read_files([str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")], "data.train_files")
    assert rows == ROWS
    assert data(rows).digest == data().digest != data(ROWS[:-1]).digest
    with refused(DataError, "c.parquet", "data.val_files"):
        read_files(str(tmp_path / "c.parquet"), "data.val_files")
    (tmp_path / "d.csv").write_text("prompt\n")
    with refused(DataError, "d.csv", ".parquet", ".jsonl"):
        read_files(str(tmp_path / "d.csv"), "data.val_files")


def test_some_rows() -> None:
    assert some_rows(ROWS, 3, shuffle=False, seed=0) == ROWS[:3]
    assert some_rows(ROWS, -1, shuffle=True, seed=0) == ROWS
    chosen = some_rows(ROWS, 5, shuffle=True, seed=0)
    assert chosen == some_rows(ROWS, 5, shuffle=True, seed=0) != ROWS[:5]


@pytest.mark.parametrize(
    ("name", "media"), [("videos", {"videos": ["a.mp4"]}), ("video", {"multi_modal_data": {"video": ["a.mp4"]}})]
)
def test_videos_are_refused(name: str, media: dict[str, Any]) -> None:
    with refused(DataError, f"'{name}'"):
        data([*ROWS, row(11) | media])
    assert data([*ROWS, row(11) | {"videos": []}]).epoch_length == 8


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8))


def encoded(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "images",
    [
        lambda seed: {"images": [{"bytes": encoded(seed), "path": None}]},
        lambda seed: {"images": [picture(seed)]},
        lambda seed: {"multi_modal_data": {"image": [picture(seed)]}},
        lambda seed: {"pics": np.array([{"bytes": encoded(seed)}], dtype=object)},
    ],
)
def test_rows_have_images(images: Callable[[int], dict[str, Any]]) -> None:
    def rows(seed: int) -> list[dict[str, Any]]:
        marked = [{"role": "user", "content": "<image>how many?"}]
        return [row(number) | {"prompt": marked} | images(seed + number) for number in range(4)]

    options: dict[str, Any] = {"image_key": "pics"} if "pics" in images(0) else {}
    made = Data(rows(0), taskset="train", origin="the rows", batch=4, **options)
    tasks = [made.visit(0, place) for place in range(4)]
    assert [len(task.prompt[0].media) for task in tasks] == [1] * 4
    assert len({task.prompt[0].media[0].sha256 for task in tasks}) == 4
    decoded = Image.open(io.BytesIO(tasks[1].prompt[0].media[0].data))
    assert np.array_equal(np.asarray(decoded), np.asarray(picture(1)))
    again = Data(rows(0), taskset="train", origin="the rows", batch=4, **options)
    other = Data(rows(7), taskset="train", origin="the rows", batch=4, **options)
    assert made.digest == again.digest != other.digest


def test_prompts_with_images_are_counted_and_never_cut(tmp_path: Path) -> None:
    model = TinyVisionModel(TinyVisionModel.Config(layers=1, hidden=32, mlp=8, vision_layers=1), seed=0)
    renderer = renderer_of(model.materialize(tmp_path / "model"))
    pictured = {"prompt": [{"role": "user", "content": "<image>"}], "images": [Image.new("RGB", (56, 56))]}
    made = Data([row(0), row(1) | pictured], taskset="train", origin="the rows", batch=1)
    kept = made.within(15, renderer, truncation="error", filtered=True)
    assert len(kept.rows) == 1
    prompt = made.visit(0, 1).prompt
    assert len(CutRenderer(renderer, 30, "left").render(prompt)) == 16 + 5
    with refused(PromptTooLong, 21, "data.max_prompt_length"):
        CutRenderer(renderer, 20, "left").render(prompt)


RENDERER = ChatRenderer(tiny_tokenizer("0123456789+= "))
LONG = [*ROWS[:8], row(8, "1+" * 20 + "1=")]


def fitted(sampler: Any = None, **more: Any) -> Data:
    options: dict[str, Any] = {"longest": 10, "renderer": RENDERER, "truncation": "error", "filtered": False}
    return data(LONG, sampler=sampler).within(**(options | more))


def test_prompts_that_are_too_long() -> None:
    with refused(DataError, "data.max_prompt_length", "row 8", 45):
        fitted()
    assert len(fitted(filtered=True).rows) == 8
    assert len(fitted(truncation="left").rows) == 9
    assert len(fitted(longest=45).rows) == 9
    with refused(DataError, "data.filter_overlong_prompts", "train_sampler"):
        fitted(filtered=True, sampler=range(9))
    with refused(DataError, "data.truncation", "'up'"):
        fitted(truncation="up")


def test_prompts_are_cut() -> None:
    prompt = Prompt(np.arange(10, dtype=np.int32))

    def cut(longest: int, truncation: Truncation) -> list[int]:
        return cut_prompt(prompt, longest, truncation, "longest", "cut it").tokens.tolist()

    assert cut(4, "left") == [6, 7, 8, 9]
    assert cut(4, "right") == [0, 1, 2, 3]
    assert cut(5, "middle") == [0, 1, 7, 8, 9]
    assert cut(10, "left") == list(range(10))
    whole = RENDERER.render([Message("user", "1+1=")])
    cutting = CutRenderer(RENDERER, 3, "left")
    assert cutting.render([Message("user", "1+1=")]).tokens.tolist() == whole.tokens[-3:].tolist()
    assert cutting.eos_token_ids == RENDERER.eos_token_ids
