"""Reward models in transformers' format: what `export --role reward` writes, and the reward that reads it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from failing import refused
from PIL import Image
from reward_parts import MESSAGES, exported, head_of, reward_model
from safetensors.torch import load_file, save_file
from training_parts import write_model
from transformers import AutoModelForSequenceClassification

from trivium.config import RewardConfig, plugin
from trivium.foundation.errors import DataError
from trivium.models.backbone.packed import pack
from trivium.models.heads.classifier import classifier_of, load_score_model
from trivium.models.heads.scoring import Conversation, SequenceScorer
from trivium.models.heads.trained_models import ScoreModel, ValueModel
from trivium.rewards.model import ModelReward
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Media, Message

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_transformers_reads_the_scores_that_training_reads(architecture: str, tmp_path: Path) -> None:
    path = reward_model(tmp_path, architecture)
    out = exported(path, tmp_path / "out", pad=0)
    model, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert model.config.num_labels == 1
    renderer = ChatRenderer(hf_tokenizer(path))
    prompt = [Message(**message) for message in MESSAGES]
    pairs = [renderer.expert(prompt, completion) for completion in ("7", "11")]
    texts = [np.concatenate([before.tokens, tokens]) for before, tokens in pairs]
    packed, last = pack(texts, CPU), torch.tensor([len(texts[0]) - 1, len(texts[0]) + len(texts[1]) - 1])
    padded = torch.tensor(np.stack([[*texts[0], 0], texts[1]]))
    reward = ModelReward(ModelReward.Config(path=str(out)))
    with torch.no_grad():
        scores = ScoreModel(path, dtype=torch.float32, device=CPU, seed=0)(packed, last)
        torch.testing.assert_close(model(padded, attention_mask=(padded != 0).int()).logits[:, 0], scores)
        for directory in (path, out):
            either = load_score_model(directory, dtype=torch.float32, device=CPU)
            torch.testing.assert_close(either(packed, last), scores)
    for each in (reward, ModelReward(ModelReward.Config(path=str(path)))):
        given = [each("3+4=", completion, MESSAGES) for completion in ("7", "11")]
        assert given == pytest.approx(scores.tolist(), abs=1e-5)
        assert given[0] != given[1]


def test_the_score_head_has_no_bias_unless_it_was_saved_with_one(tmp_path: Path) -> None:
    path = reward_model(tmp_path)
    how = {"dtype": torch.float32, "device": CPU, "seed": 0}
    assert set(load_file(head_of(path))) == {"weight"}
    assert ScoreModel(path, **how).value_head.bias is None
    assert ValueModel(path, **how).value_head.bias.tolist() == [0]  # a critic that starts from a reward model
    save_file({**load_file(head_of(path)), "bias": torch.tensor([2.0])}, head_of(path))
    assert ScoreModel(path, **how).value_head.bias.tolist() == [2]
    assert classifier_of(path, pad_token_id=None).score.bias is None


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    path = reward_model(tmp_path)
    head_of(path).rename(tmp_path / "head")
    section = plugin("rewards", RewardConfig)({"kind": "model", "path": str(path)})
    (problem,) = section.problems(None, "rewards[0]")
    assert problem.where == "rewards[0].path"
    assert "Qwen3Model" in problem.found
    assert "--role reward" in problem.do
    with refused(DataError, path):
        ModelReward(ModelReward.Config(path=str(path)))
    (tmp_path / "head").rename(head_of(path))
    two = classifier_of(path, pad_token_id=None)
    two.score, two.config.num_labels = torch.nn.Linear(32, 2, bias=False), 2
    two.save_pretrained(tmp_path / "two")
    hf_tokenizer(path).save_pretrained(tmp_path / "two")
    with refused(DataError, "2 outputs"):
        ModelReward(ModelReward.Config(path=str(tmp_path / "two")))


def test_a_conversation_beyond_the_context_is_an_error_of_its_own(tmp_path: Path) -> None:
    reward = ModelReward(ModelReward.Config(path=str(exported(reward_model(tmp_path), tmp_path / "out"))))
    with refused(DataError, "24", "max_position_embeddings"):
        reward("", "7" * 30, MESSAGES)


def test_a_model_that_reads_images_scores_conversations_with_their_images(tmp_path: Path) -> None:
    """Its tokenizer and processor are those of the checkpoint's policy."""
    policy = TinyVisionModel(TinyVisionModel.Config(hidden=32, heads=2, mlp=32, layers=1), seed=1)
    model_dir, path = policy.materialize(tmp_path / "policy"), tmp_path / "reward"
    model = ScoreModel(model_dir, dtype=torch.float32, device=CPU, seed=3)
    model.module.save_pretrained(path)
    save_file({name: 100 * value for name, value in model.value_head.state_dict().items()}, head_of(path))
    reward = ModelReward(ModelReward.Config(path=str(path)))
    red, blue = (image(colour) for colour in ("red", "blue"))
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    plain, of_red, of_blue = (reward("3", "4", messages, media) for media in ([], [red], [blue]))
    assert len({plain, of_red, of_blue}) == 3
    rendered = renderer_of(model_dir)
    prompt, tokens = rendered.expert([Message(**m) for m in messages[:2]] + [Message("user", "3", (red,))], "4")
    sequence = Conversation(np.concatenate([prompt.tokens, tokens]), prompt.media)
    scorer = SequenceScorer(
        load_score_model(path, dtype=torch.float32, device=CPU), model_dir=model_dir, max_tokens=999
    )
    assert scorer.scores([sequence]) == [of_red]
    assert scorer.scores([Conversation(tokens), sequence])[1] == pytest.approx(of_red, abs=1e-4)
    marked = [{**messages[0], "content": "1<image>"}, *messages[1:]]
    assert reward("3", "4", marked, [red]) != of_red
    with refused(DataError, "2 images", "marks 1"):
        reward("3", "4", marked, [red, blue])
    text_only = ModelReward(ModelReward.Config(path=str(reward_model(tmp_path / "text"))))
    with refused(DataError, "images", "text only"):
        text_only("3", "4", MESSAGES, [red])


def test_a_prompt_is_computed_once_for_all_completions_of_a_pass(tmp_path: Path) -> None:
    model = load_score_model(reward_model(tmp_path / "judge"), dtype=torch.float32, device=CPU)
    rows: list[int] = []
    model.backbone.module.layers[0].register_forward_hook(lambda layer, args, output: rows.append(args[0].shape[1]))
    rng = np.random.default_rng(0)
    prompt, *completions = (rng.integers(3, 10, length).astype(np.int32) for length in (12, *[5, 9, 1, 7, 3, 8] * 2))
    conversations = [Conversation(np.concatenate([prompt, each])) for each in completions]
    alone = SequenceScorer(model).scores(conversations)
    rows.clear()
    together = SequenceScorer(model, max_tokens=1000).scores(conversations)
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert rows == [96], "12 + 66 rows, filled to a multiple of 32; 210, filled to 224, if nothing was shared"


def image(colour: str) -> Media:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(file, "PNG")
    return Media("image/png", file.getvalue())


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with refused(DataError, "score.weight"):
        load_score_model(write_model(tmp_path, "llama"), dtype=torch.float32, device=CPU)
