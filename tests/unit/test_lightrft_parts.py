"""ActorVL, CriticVL, ExperienceVL and Strategy: LightRFT's objects over the core's models, batches and learner."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch
from training_parts import write_model
from vision_parts import FAMILIES, by_transformers, rolled_out, tiny, with_plain_text

from trivium.frontdoors.lightrft import ActorVL, ExperienceVL
from trivium.models.processor import hf_processor
from trivium.types import Batch


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A tiny model of a family, and completions of its engine over conversations with pictures."""

    @cache
    def built(family: str) -> tuple[Path, Batch]:
        path = tiny(tmp_path_factory.mktemp(family), family)
        return path, with_plain_text(path, asyncio.run(rolled_out(path)))

    return built


# --------------------------------------------------------------------------- ActorVL

SEQUENCES = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])


def by_logits(actor: ActorVL, actions: int) -> torch.Tensor:
    positions = (MASK.cumsum(1) - 1).clamp(min=0)  # what GPT-2 leaves to its caller
    logits = actor.model(SEQUENCES, attention_mask=MASK, position_ids=positions).logits / actor.temperature
    log_prob = logits.log_softmax(-1)[:, :-1].gather(2, SEQUENCES[:, 1:, None])[..., 0]
    return (log_prob * MASK[:, 1:])[:, -actions:]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_forward_is_the_models_own_log_probability_with_its_gradient(name: str, tmp_path: Path) -> None:
    actor = ActorVL(str(write_model(tmp_path, name)), temperature=0.7)
    expected = by_logits(actor, 4)
    wanted = torch.autograd.grad(expected.square().sum(), list(actor.model.parameters()))
    log_prob = actor(SEQUENCES, 4, MASK)
    assert log_prob.detach().numpy() == pytest.approx(expected.detach().numpy(), abs=1e-5)
    log_prob.square().sum().backward()
    for parameter, gradient in zip(actor.model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_reads_pixels_as_transformers_does_with_the_models_own_positions(family: str, seen) -> None:
    path, batch = seen(family)
    experience = ExperienceVL.from_batch(batch, processor=hf_processor(path, backend="pil"))
    pixels = (experience.pixel_values, experience.image_grid_thws)
    with torch.no_grad():
        log_prob = ActorVL(path)(
            experience.sequences,
            experience.num_actions,
            experience.attention_mask,
            *pixels,
            **experience.pixel_inputs,
        )
    for row, each in enumerate(batch.experiences):
        expected = by_transformers(path, each)[each.response_mask]
        assert log_prob[row][experience.action_mask[row]].numpy() == pytest.approx(expected, abs=1e-5)
