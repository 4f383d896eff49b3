"""LightRFT's data sets: prompts with images, references and labels, mixed sets, supervised text."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.failing import refused
from trivium.errors import ConfigError, DataError
from trivium.frontdoors.lightrft.arguments import OPTIONAL, REQUIRED
from trivium.frontdoors.lightrft.objects.data.data import (
    PromptDatasetVL,
    SFTDatasetVL,
    blending_datasets,
    get_tokenizer_processor_vl,
)
from trivium.frontdoors.lightrft.translation import namespace_of
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel

SIZES: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "mlp": 8}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Tokenizer and processor of a model that sees."""
    config = TinyVisionModel.Config(**SIZES, vision_layers=1, vision_hidden=8, vision_heads=1, image_size=28)
    return get_tokenizer_processor_vl(TinyVisionModel(config, seed=0).materialize(tmp_path_factory.mktemp("v") / "m"))


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokenizer of a model that reads text."""
    model = TinyModel(TinyModel.Config(**SIZES), seed=0).materialize(tmp_path_factory.mktemp("t") / "m")
    tokenizer, processor = get_tokenizer_processor_vl(model, padding_side="left")
    assert (processor is tokenizer, tokenizer.padding_side) == (True, "left")
    return tokenizer


def picture(shade: int) -> Image.Image:
    return Image.fromarray(np.full((28, 28, 3), shade, np.uint8))


def prompts(rows: Any, seeing: tuple[Any, Any], template: str | None = None, **args: Any) -> PromptDatasetVL:
    strategy = Namespace(args=Namespace(**{"input_key": "prompt", "images_key": "images", **args}))
    return PromptDatasetVL(rows, *seeing, 64, strategy, template)


def test_a_prompt_has_a_place_for_each_of_its_images(seeing: tuple[Any, Any]) -> None:
    first, second = picture(10), picture(200)
    rows = [
        {"prompt": "<image> or <image>?", "images": [first, second], "reference": "b", "label": "geo3k_rule"},
        {"prompt": [{"role": "user", "content": "which?"}], "images": first, "ground_truth": "a"},
        {"prompt": "none?", "images": None, "extra_info": {"constraints": "c", "label": "other"}},
    ]
    data = prompts(rows, seeing, apply_chat_template=True, system_prompt="Look.")
    columns = data.collate_fn([data[number] for number in range(3)])
    texts, images, references, labels = columns
    assert images == [[first, second], [first], None]
    assert (references, labels) == (["b", "a", "c"], ["geo3k_rule", None, "other"])
    token = seeing[1].image_token
    assert [text.count(token) for text in texts] == [2, 1, 0]
    assert all("Look." in text for text in texts)
    assert texts[0].index(token) < texts[0].index(" or ") < texts[0].rindex(token)


def test_without_a_chat_template_the_prompt_goes_into_the_input_template(seeing: tuple[Any, Any]) -> None:
    data = prompts([{"prompt": "1+1", "images": [picture(1)]}], seeing, "Q: {} A:", system_prompt="unused")
    assert data[0][0] == "Q: <image>1+1 A:"
    assert prompts([{"prompt": "{x}"}], seeing, "Q: {}")[0][0] == "Q: {x}"
    with pytest.raises(ConfigError):
        prompts([], seeing, "no place")


def test_videos_have_a_column_of_their_own_and_are_refused(seeing: tuple[Any, Any]) -> None:
    data = prompts([{"prompt": "a", "videos": None}, {"prompt": "b", "videos": ["x.mp4"]}], seeing, videos_key="videos")
    assert data.collate_fn([data[0]]) == (["a"], [None], [None], [None], [None])
    with refused(DataError, "videos"):
        data[1]


@pytest.mark.parametrize(
    ("row", "args"),
    [
        ({"question": "a"}, {}),
        ({"prompt": "<image>", "images": [picture(1), picture(2)]}, {}),
        ({"prompt": "a", "images": [picture(1), picture(2)]}, {"limit_mm_image_per_prompt": 1}),
        ({"prompt": "a", "images": ["missing.png"]}, {}),
    ],
)
def test_rows_that_are_no_prompts_are_refused(
    seeing: tuple[Any, Any], row: dict[str, Any], args: dict[str, Any]
) -> None:
    with refused(DataError, "row 0"):
        prompts([row], seeing, apply_chat_template=True, **args)[0]


def test_text_alone_is_read_without_a_processor(reading: Any, seeing: tuple[Any, Any]) -> None:
    rows = [{"prompt": "a", "images": [picture(1)]}]
    assert prompts(rows, (reading, None), apply_chat_template=True)[0][1] is None
    assert prompts(rows, seeing, apply_chat_template=True, text_only=True)[0][1] is None


def test_sets_are_files_folders_and_parts_of_folders(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "inner").mkdir()
    picture(3).save(tmp_path / "p.png")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": n, "images": ["p.png"]}) + "\n" for n in range(20)))
    parquet.write_table(pyarrow.table({"n": [20, 21]}), tmp_path / "inner" / "b.parquet")
    named = f"{tmp_path}/a.jsonl, {tmp_path}@inner/b.parquet"
    rows = blending_datasets(named)
    assert [row["n"] for row in rows] == list(range(22))
    assert rows[0]["images"] == [str(tmp_path / "p.png")]
    assert len(rows.select(range(3))) == len(blending_datasets(named, max_count=3)) == 3
    mixed = [row["n"] for row in blending_datasets(named, "0.9,0.1", seed=1)]
    assert mixed == [row["n"] for row in blending_datasets(named, [9, 1], seed=1)] != list(range(len(mixed)))
    assert sorted(mixed) == sorted(set(mixed))
    with pytest.raises(ConfigError):
        blending_datasets(named, "0.9,x")
    with pytest.raises(DataError):
        blending_datasets(f"{tmp_path}/missing")


def test_supervised_text_is_whole_and_padded_on_the_right(reading: Any) -> None:
    strategy = Namespace(args=Namespace(input_key="q", output_key="a"))
    rows = [{"q": "1+1=", "a": "2"}, {"q": "longer", "a": None}]
    data = SFTDatasetVL(rows, reading, None, 6, strategy, "{}?")
    lengths, ids, mask, *_ = data.collate_fn([data[0], data[1]])
    assert (lengths, ids.shape, mask.sum(-1).tolist()) == ([5, 6], (2, 1, 6), [[6], [6]])
    assert reading.decode(ids[0, 0, :5]) == "1+1=?"
    short = SFTDatasetVL(rows, reading, None, 64, strategy)
    ids, mask = short.collate_fn([short[0], short[1]])[1:3]
    assert ids[mask.bool()].eq(reading.eos_token_id).sum() == 2
    assert torch.equal(mask[0, 0], torch.tensor([1] * 6 + [0]))
    with pytest.raises(DataError):
        SFTDatasetVL([{"other": "x"}], reading, None, 6, strategy)[0]


def test_a_namespace_has_every_flag_with_the_defaults_of_the_launcher() -> None:
    args = namespace_of(["--pretrain", "m", "--prompt_data", "d", "--n_samples_per_prompt", "4", "--l2", "1e-2"])
    assert (args.n_samples_per_prompt, args.l2, args.rollout_batch_size, args.kl_estimator) == (4, 0.01, 512, "k1")
    assert (args.adam_betas, args.freezing_actor_steps, args.bf16, args.ema_beta) == ([0.9, 0.95], -1, False, 0.992)
    with pytest.raises(ConfigError):
        namespace_of({"pretrain": "m", "rollout_batchsize": 4})
    assert {name for name in REQUIRED if getattr(args, name) is None} == set()
    assert {name: getattr(args, name) for name in OPTIONAL} == OPTIONAL
