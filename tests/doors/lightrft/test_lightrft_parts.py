"""ActorVL, CriticVL, ExperienceVL and Strategy: LightRFT's objects over the core's models, batches and learner."""

from __future__ import annotations

import asyncio
import copy
import shutil
from argparse import Namespace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_parts_of_lightrft import on_ranks
from rank_processes import run_ranks
from training_parts import Reinforce, SquaredError, make_batch, write_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, get_scheduler
from vision_parts import FAMILIES, by_transformers, rolled_out, tiny, with_plain_text

from tests.failing import refused
from trivium.foundation.atomic import commit, staging_directory
from trivium.foundation.errors import ConfigError, DataError, RunDirError, TriviumError
from trivium.frontdoors.lightrft import ActorVL, CriticVL, ExperienceVL, FSDPV2Strategy, Strategy, get_strategy
from trivium.frontdoors.lightrft.objects.checkpoints import load, save
from trivium.frontdoors.lightrft.objects.trainer_engine import Trained, TrainerEngine
from trivium.models.vision.processor import hf_processor
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
    # In float64: where memory happens to lie decides the last bits of a product in float32, and they grow on the way.
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        log_prob = ActorVL(model)(
            experience.sequences,
            experience.num_actions,
            experience.attention_mask,
            *pixels,
            **experience.pixel_inputs,
        )
    for row, each in enumerate(batch.experiences):
        expected = by_transformers(path, each, torch.float64)[each.response_mask]
        assert log_prob[row][experience.action_mask[row]].numpy() == pytest.approx(expected, abs=1e-6)


def test_positions_of_actions_padding_and_masks_change_nothing(text_dir: Path) -> None:
    """Packed as in the original, one row alone, an attention mask in whole numbers or none, a row of padding alone."""
    actor = ActorVL(text_dir)
    with torch.no_grad():
        both = actor(SEQUENCES, 4, MASK)
        assert actor(SEQUENCES[:1, 2:], 4) == pytest.approx(both[:1])
        packed = torch.cat([SEQUENCES[:1, 2:], SEQUENCES[1:, :6]], 1)
        flat = actor(packed, [4, 3], torch.tensor([[1] * 5 + [2] * 6]), packed_seq_lens=[5, 6])
        assert flat == pytest.approx(torch.cat([both[:1], both[1:, :3]], 1))
        empty = actor(torch.cat([SEQUENCES, SEQUENCES[:1]]), 4, torch.cat([MASK, MASK[:1] * 0]))
        assert empty.tolist() == [*both.tolist(), [0, 0, 0, 0]]
        log_prob, output = actor(SEQUENCES, 4, MASK, return_output=True)
        assert log_prob.tolist() == both.tolist()
        assert output.logits.shape == (2, 7, 31)
    for actions in (0, 7, None):
        with refused(ConfigError, "num_actions"):
            actor(SEQUENCES, actions, MASK)


def test_generate_samples_from_the_weights_as_they_are_now(text_dir: Path) -> None:
    """Greedy completions are the models' own argmax, before and after the weights change; a sampled end of sequence is
    an action, and a completion without one keeps its last token."""
    actor = ActorVL(text_dir)
    prompts = {"input_ids": SEQUENCES[:, :5], "attention_mask": MASK[:, :5]}
    for _ in range(2):
        sequences, attention, actions = actor.generate(**prompts, max_new_tokens=5, do_sample=False, eos_token_id=30)
        for row in range(2):
            tokens = sequences[row][attention[row].bool()]
            logits = actor.model(tokens[None]).logits[0]
            start = int(attention[row, :5].sum())
            assert logits.argmax(1)[start - 1 : -1].tolist() == tokens[start:].tolist()
        assert attention[:, 5:].bool().equal(actions)
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter.mul_(-1.5)
    torch.manual_seed(1)
    how = {"max_new_tokens": 8, "eos_token_id": [2, 7], "pad_token_id": 0, "temperature": 3.0}
    first, second = (actor.generate(**prompts, **how)[0] for _ in range(2))
    assert first.tolist() != second.tolist()
    many = actor.generate(SEQUENCES[:1, 2:].expand(64, -1), **how)
    ends = torch.isin(many[0][:, 5:], torch.tensor([2, 7]))
    for row in range(64):
        length = int(many[2][row].sum())
        assert ends[row, :length].sum() == (0 if length == 8 and not ends[row, 7] else 1)
        assert not many[0][row, 5 + length :].any()
    assert any(bool(row.all()) for row in many[2])
    assert not all(bool(row.all()) for row in many[2])
    actor.close()


@pytest.mark.parametrize("family", ["qwen2_vl", "idefics3"])
def test_generate_reads_pixels_as_the_engine_reads_images(family: str, seen) -> None:
    path, batch = seen(family)
    experience = ExperienceVL.from_batch(batch, processor=hf_processor(path, backend="pil")).split()[2]
    context = experience.sequences.shape[1] - experience.num_actions
    actor = ActorVL(path)
    pixels = {"image_grid_thw": experience.image_grid_thws, **experience.pixel_inputs}
    sequences, _, _ = actor.generate(
        experience.sequences[:, :context], experience.pixel_values, **pixels, do_sample=False, max_new_tokens=3
    )
    actor.close()
    shown = {"pixel_values": experience.pixel_values, **pixels}
    with torch.no_grad():
        _, output = actor(sequences, 3, return_output=True, **shown)
    assert output.logits[0].argmax(1)[context - 1 : -1].tolist() == sequences[0, context:].tolist()


def test_sequences_of_another_engine_get_the_masks_that_were_meant(text_dir: Path) -> None:
    """A completion without an end of sequence keeps its last token."""
    sequences = torch.tensor([[0, 5, 6, 7, 8, 2, 2, 2], [5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 6, 2, 2, 2, 2, 2]])
    given, attention, actions = ActorVL(text_dir).process_sequences(sequences, 3, 2, 0)
    assert given.tolist() == sequences.tolist()
    assert attention.tolist() == [[0, 1, 1, 1, 1, 1, 0, 0], [1] * 8, [0, 0, 1, 1, 0, 0, 0, 0]]
    assert actions.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_in_4bit": True, "device_map": "meta"}, "load_in_4bit"),
        ({"lora_rank": 2, "lora_dropout": 0.1}, "lora_dropout"),
        ({"ds_config": {}}, "ds_config"),
        ({"device_map": "auto"}, "auto"),
        ({"lora_rnk": 2, "lora_dropout": 0.1}, "lora_dropout, lora_rnk"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(options, named: str, text_dir: Path) -> None:
    for kind in (ActorVL, CriticVL):
        with pytest.raises(ConfigError, match=named):
            kind(text_dir, **options)


def test_the_model_and_its_size_are_those_of_an_actor(text_dir: Path) -> None:
    actor = ActorVL(text_dir, lora_rank=2)
    assert Strategy().unwrap_model(actor) is actor.model
    trained = sum(parameter.numel() for parameter in actor.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in actor.parameters())
    assert 0 < trained < total
    assert actor.print_trainable_parameters() == f"{trained:,} of {total:,} parameters are trained"


def test_weights_in_four_bits_are_frozen_beside_an_adapter(text_dir: Path) -> None:
    pytest.importorskip("bitsandbytes")
    strategy, frozen = Strategy(), ActorVL(text_dir, load_in_4bit=True)
    with refused(ConfigError, "load_in_4bit", "lora_rank"):
        strategy.prepare_model(frozen, is_training=True)
    actor = strategy.prepare_model(ActorVL(text_dir, load_in_4bit=True, lora_rank=2), is_training=True)
    torch.testing.assert_close(actor(SEQUENCES, 3, MASK), strategy.prepare_model(frozen)(SEQUENCES, 3, MASK))
    learner = strategy.learner("policy", actor, strategy.create_optimizer(actor, lr=0.1), max_response_length=32)
    update(learner, make_batch(advantages=1.0))
    assert not torch.equal(actor(SEQUENCES, 3, MASK), frozen(SEQUENCES, 3, MASK))


def test_arguments_of_generate_that_are_unknown_are_errors(text_dir: Path) -> None:
    actor = ActorVL(text_dir)
    for wrong in ({"num_beams": 2}, {"max_new_token": 3}, {"max_length": 2}, {}):
        with refused(ConfigError, "generate"):
            actor.generate(SEQUENCES, eos_token_id=2, **wrong)
    with refused(DataError, "pixel_values_videos"):
        actor.generate(SEQUENCES, pixel_values_videos=SEQUENCES)
    with refused(ConfigError, "pixel_values"):
        actor.generate(SEQUENCES, torch.zeros(1, 3, 4, 4), max_new_tokens=1, eos_token_id=2)


def test_bfloat16_computes_from_float32_weights_and_models_stay_in_eval_mode(tmp_path: Path) -> None:
    """GPT-2 has dropout; half-precision weights that are given become whole ones."""
    path = write_model(tmp_path, "gpt2")
    full, halved = ActorVL(path).train(), ActorVL(path, bf16=True)
    assert not any(part.training for part in (*full.modules(), *full.language_model.modules()))
    given = ActorVL(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    for actor in (halved, given):
        assert actor.model.dtype == torch.float32
        torch.testing.assert_close(actor(SEQUENCES, 4, MASK), full(SEQUENCES, 4, MASK), rtol=0.05, atol=0.1)
        assert actor(SEQUENCES, 4, MASK).tolist() != full(SEQUENCES, 4, MASK).tolist()


def test_a_copy_of_an_actor_is_of_its_own(text_dir: Path) -> None:
    actor = ActorVL(text_dir)
    before = actor(SEQUENCES, 3, MASK)
    other = copy.deepcopy(actor)
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(2)
    assert actor(SEQUENCES, 3, MASK).tolist() == before.tolist()
    assert other(SEQUENCES, 3, MASK).tolist() != before.tolist()


# --------------------------------------------------------------------------- CriticVL


def test_values_are_those_of_the_state_before_each_action(text_dir: Path, tmp_path: Path) -> None:
    critic = CriticVL(text_dir, seed=5)
    with torch.no_grad():
        critic.value_head.weight.normal_()
        states = critic.model(SEQUENCES, attention_mask=MASK).last_hidden_state
        expected = critic.value_head(states)[:, :-1, 0] * MASK[:, 1:]
    values = critic(SEQUENCES, 4, MASK)
    assert values.detach().numpy() == pytest.approx(expected[:, -4:].numpy(), abs=1e-5)
    values.square().sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())
    Strategy().save_model(critic, None, tmp_path / "critic")
    again = CriticVL(tmp_path / "critic")
    assert again(SEQUENCES, 4, MASK).tolist() == values.tolist()
    assert CriticVL(tmp_path / "critic", init_value_head=True)(SEQUENCES, 4, MASK).tolist() != values.tolist()


def test_a_critic_shares_the_trunk_of_an_actor_it_is_given(text_dir: Path) -> None:
    actor = ActorVL(text_dir)
    critic = CriticVL(actor)
    assert {id(p) for p in critic.model.parameters()} <= {id(p) for p in actor.model.parameters()}
    with torch.no_grad():
        before = critic(SEQUENCES, 3, MASK)
        actor.model.get_input_embeddings().weight.mul_(2)
        assert critic(SEQUENCES, 3, MASK).tolist() != before.tolist()


def test_a_critic_with_an_adapter_trains_it_and_its_head_and_saves_both(text_dir: Path, tmp_path: Path) -> None:
    critic, strategy = CriticVL(text_dir, lora_rank=2), Strategy()
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {"value_head.weight", "value_head.bias"} < trained
    assert all("lora_" in name or name.startswith("value_head") for name in trained)
    optimizer = strategy.create_optimizer(critic, lr=0.1)
    learner = strategy.learner("critic", critic, optimizer, max_response_length=32)
    before = critic(SEQUENCES, 4, MASK).tolist()
    update(learner, make_batch(returns=1.0), SquaredError())
    values = critic(SEQUENCES, 4, MASK).detach()
    assert values.tolist() != before
    strategy.save_model(critic, None, tmp_path / "merged")
    torch.testing.assert_close(CriticVL(tmp_path / "merged")(SEQUENCES, 4, MASK).detach(), values)
    engine = engine_of(strategy, {"critic": Trained(critic, optimizer)})
    engine.save(tmp_path / "saved")
    update(learner, make_batch(returns=1.0), SquaredError())
    engine.load(tmp_path / "saved")
    assert critic(SEQUENCES, 4, MASK).tolist() == values.tolist()


# --------------------------------------------------------------------------- ExperienceVL


def equal(one: Batch, other: Batch) -> None:
    for mine, theirs in zip(one.experiences, other.experiences, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.response_mask.tolist() == theirs.response_mask.tolist()
        assert (mine.group_id, mine.index, mine.rewards, mine.media) == (
            (theirs.group_id, theirs.index, theirs.rewards, theirs.media)
        )
    assert one.columns.keys() == other.columns.keys()
    for name, arrays in one.columns.items():
        for row, array in enumerate(arrays):
            mask = one.experiences[row].response_mask
            assert array[mask].tolist() == other.columns[name][row][mask].tolist()


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "idefics3"])
def test_a_batch_comes_back_as_it_was_also_in_parts(family: str, seen) -> None:
    path, batch = seen(family)
    rng = np.random.default_rng(0)
    names = ("old_log_prob", "ref_log_prob", "values", "advantages", "returns", "entropy", "sum_pi_squared")
    batch = batch.with_columns(**{name: [rng.normal(size=len(e)) for e in batch.experiences] for name in names})
    masks = [np.ones(len(e), np.bool_) for e in batch.experiences]
    masks[1][:] = False  # a row without a trained token
    batch = batch.masked(masks)
    experience = ExperienceVL.from_batch(batch, processor=hf_processor(path, backend="pil"))
    equal(batch, experience.to_batch())
    joined = ExperienceVL.join([ExperienceVL.join(experience.split()[2:]), *experience.split()[:2]])
    equal(batch.select([2, 3, 0, 1]), joined.to_batch())
    again = ExperienceVL.join(experience.split())
    for name in ("sequences", "attention_mask", "action_mask", "pixel_values", "image_grid_thws", "values"):
        ours, theirs = getattr(experience, name), getattr(again, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    experience.advantages = experience.advantages * 2
    changed, mask = experience.to_batch().columns["advantages"][0], batch.experiences[0].response_mask
    assert changed[mask].tolist() == (2 * batch.columns["advantages"][0][mask]).tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_an_experience_made_by_hand_trains_as_one_of_the_engine(family: str, seen) -> None:
    """Plain tensors, right-aligned responses, pixels: the scores are those of the engine's record."""
    path, batch = seen(family)
    made = ExperienceVL.from_batch(batch, processor=hf_processor(path, backend="pil"))
    plain = ExperienceVL(
        made.sequences,
        made.pixel_values,
        made.image_grid_thws,
        attention_mask=made.attention_mask,
        action_mask=made.action_mask,
        pixel_inputs=made.pixel_inputs,
        info={"reward": torch.arange(4.0)},
    )
    with refused(DataError, "to_batch(actor.vision)"):
        plain.to_batch()
    actor = ActorVL(path)
    learner = Strategy().learner("policy", actor, max_response_length=16)
    mine, theirs = plain.to_batch(actor.vision), batch
    assert [each.reward for each in mine.experiences] == [0, 1, 2, 3]
    scores = [learner.score(each, "log_prob") for each in (mine, theirs)]
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    if made.image_grid_thws is not None:
        plain.image_grid_thws, plain.pixel_values = made.image_grid_thws[:-1], made.pixel_values
        with refused(DataError, "patches"):
            plain.to_batch(actor.vision)


def test_experiences_that_do_not_fit_are_errors() -> None:
    plain = ExperienceVL(SEQUENCES, attention_mask=MASK)
    with refused(DataError, "action_mask"):
        plain.to_batch()
    plain.action_mask = torch.ones(2, 3, dtype=torch.bool)
    with refused(DataError, "action_mask", "padding"):
        plain.to_batch()
    plain.action_mask[1, 2] = False
    plain.advantages = torch.zeros(2, 4)
    with refused(DataError, "advantages"):
        plain.to_batch()
    plain.advantages = None
    assert [e.response_mask.sum() for e in plain.to_batch().experiences] == [3, 2]
    plain.pin_memory().to_device("cpu")
    with refused(DataError, "pixel_values_videos"):
        ExperienceVL(SEQUENCES, pixel_values_videos=SEQUENCES, action_mask=plain.action_mask).to_batch()


# --------------------------------------------------------------------------- Strategy


def engine_of(strategy: Strategy, trained: dict[str, Trained], average: ActorVL | None = None) -> TrainerEngine:
    limits = {"max_response_length": 32, "train_sequences": 8, "score_sequences": 8}
    return TrainerEngine(strategy, trained, average=average, max_norm=1.0, **limits)


def update(learner, batch: Batch, objective=None, step: int = 0, norm: float = 1.0) -> dict[str, float]:
    return learner.update(batch, objective or Reinforce(), None, norm, step=step, who="a test")


def trained(path: Path, folder: Path, steps: range, *, resume: bool = False, **options) -> dict[str, torch.Tensor]:
    """The weights, and the average, after these steps."""
    strategy = Strategy(args=Namespace(seed=1))
    actor, average = ActorVL(path, **options), ActorVL(path)
    params = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9) if options else torch.optim.AdamW(params, lr=0.01)
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, 1, 6, scheduler_specific_kwargs={"min_lr": 0.001})
    actor, optimizer, scheduler = strategy.prepare((actor, optimizer, scheduler))
    engine = engine_of(strategy, {"policy": Trained(actor, optimizer, scheduler)}, average)
    if resume:
        assert load(engine, folder, 0, ranks=strategy.ranks) == {"consumed_samples": 8 * steps.start}
    for step in steps:
        engine.update("policy", make_batch(seed=step, advantages=1.0), Reinforce())
        strategy.moving_average(actor, average, 0.9)
        state = {"consumed_samples": 8 * (step + 1)}
        save(engine, folder, step + 1, state, keep=2, ranks=strategy.ranks)
    return {**dict(actor.export_weights()), **{f"average.{n}": t for n, t in average.export_weights()}}


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2, "target_modules": "all-linear"}], ids=["full", "lora"])
def test_a_run_that_was_stopped_continues_bit_for_bit(options, text_dir: Path, tmp_path: Path) -> None:
    """Weights, optimizer, scheduler, average and client state; only the newest checkpoints are kept."""
    whole = trained(text_dir, tmp_path / "whole", range(4), **options)
    trained(text_dir, tmp_path / "parts", range(2), **options)
    (tmp_path / "parts" / ".step-000003.0123abcd.writing").mkdir()  # of a process that was killed in a save
    parts = trained(text_dir, tmp_path / "parts", range(2, 4), resume=True, **options)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["step-000003", "step-000004"]


def test_checkpoints_that_are_damaged_or_of_another_model_are_refused(text_dir: Path, tmp_path: Path) -> None:
    strategy, actor = Strategy(), ActorVL(text_dir)
    ranks = strategy.ranks
    engine = engine_of(strategy, {"policy": Trained(actor, strategy.create_optimizer(actor))})
    assert load(engine, tmp_path, 0, ranks=ranks) == {}
    with refused(DataError, "JSON"):
        save(engine, tmp_path, 1, {"x": torch.zeros(1)}, keep=3, ranks=ranks)
    assert not list(tmp_path.glob("*/"))
    for step in (1, 2, 3):
        save(engine, tmp_path, step, {"consumed_samples": 4 * step}, keep=3, ranks=ranks)
    assert load(engine, tmp_path, 8, ranks=ranks) == {"consumed_samples": 8}
    assert load(engine, tmp_path, 0, ranks=ranks) == {"consumed_samples": 12}
    assert load(engine, tmp_path, 7, ranks=ranks) == {}
    plain = torch.optim.SGD(actor.parameters(), lr=0.1)
    critic = CriticVL(text_dir)
    for other in (Trained(actor, plain), Trained(critic, strategy.create_optimizer(critic))):
        with refused(RunDirError, "step-000003"):
            load(engine_of(strategy, {"policy": other}), tmp_path, 0, ranks=ranks)
    for damaged in ('{"client_state": {}}', "{}", "{"):
        (tmp_path / "step-000003" / "state.json").write_text(damaged)
        with refused(RunDirError, "state.json"):
            load(engine, tmp_path, 0, ranks=ranks)
    staging = staging_directory(tmp_path / "step-000005")
    (staging / "state.json").write_text('{"stage": 0}')  # of another program
    commit(staging, tmp_path / "step-000005", 5)
    with refused(RunDirError, "step-000005", "state.json"):
        load(engine, tmp_path, 0, ranks=ranks)
    shutil.rmtree(tmp_path / "step-000005")
    save(engine, tmp_path, 4, {}, keep=1, ranks=ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_a_saved_model_is_one_that_transformers_loads_with_the_adapter_added(text_dir: Path, tmp_path: Path) -> None:
    actor, strategy = ActorVL(text_dir, lora_rank=2, lora_alpha=8), Strategy()
    assert 0 < sum(p.numel() for p in actor.parameters() if p.requires_grad) < 10_000
    learner = strategy.learner("policy", actor, strategy.create_optimizer(actor, lr=0.1), max_response_length=32)
    update(learner, make_batch(advantages=1.0))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("stays")
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    strategy.save_model(actor, None, tmp_path / "hf")
    assert (tmp_path / "hf" / "mine.txt").is_file()
    assert [path.name for path in (tmp_path / "hf").glob("model*")] == ["model.safetensors"]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(SEQUENCES, attention_mask=MASK).logits
        torch.testing.assert_close(loaded, actor.model(SEQUENCES, attention_mask=MASK).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_average_moves_by_one_minus_beta_each_step(text_dir: Path, lora_rank: int) -> None:
    """The average of an actor with an adapter has none: it follows the merged weights."""
    model, average = ActorVL(text_dir, lora_rank=lora_rank), ActorVL(text_dir)
    before = {name: tensor.clone() for name, tensor in average.export_weights()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    Strategy().moving_average(model, average, beta=0.75)
    current = dict(model.export_weights())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in current.items())
    for name, tensor in average.export_weights():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * current[name])


def test_losses_of_ones_own_take_steps_through_the_strategy(text_dir: Path) -> None:
    strategy, actor = Strategy(max_norm=0.5), ActorVL(text_dir)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in actor.parameters()]
    strategy.backward(actor(SEQUENCES, 3, MASK).sum(), actor, optimizer)
    norm = strategy.optimizer_step(optimizer, actor, name="actor")
    pairs = zip(before, actor.parameters(), strict=True)
    moved = torch.cat([(a - b.detach()).flatten() for a, b in pairs]).norm()
    assert norm > 0.5
    assert float(moved) == pytest.approx(0.5, rel=1e-3)
    assert all(parameter.grad is None for parameter in actor.parameters())
    other = torch.optim.SGD(ActorVL(text_dir).parameters(), lr=1.0)
    with refused(TriviumError, "Qwen3ForCausalLM", "SGD", "24"):
        strategy.learner("policy", actor, other, max_response_length=8)


def test_two_ranks_train_save_and_resume_as_one(tmp_path: Path) -> None:
    """Sharded parameters, shares of unequal work, an optimizer built before; a run of two ranks goes on alone."""
    path, batch = write_model(tmp_path / "model"), make_batch(advantages=1.0, returns=1.0)
    one = on_ranks(0, 1, path, tmp_path / "one", batch)
    two = run_ranks([2], on_ranks, tmp_path / "ranks", path, tmp_path / "two", batch)[2]
    again = on_ranks(0, 1, path, tmp_path / "two", batch, first=2)
    for result in (*two, again):
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=0, atol=1e-9)
            torch.testing.assert_close(result["average"][name], one["average"][name], rtol=0, atol=1e-9)
        assert result["metrics"][-1] == pytest.approx(one["metrics"][-1], rel=1e-5)
        assert result["sequences"].tolist() == one["sequences"].tolist()
        torch.testing.assert_close(result["log_prob"], one["log_prob"], rtol=0, atol=1e-9)
        torch.testing.assert_close(result["value"], one["value"], rtol=0, atol=1e-5)
    assert [result["sum"]["b"].tolist() for result in two] == [[2.0, 1.0]] * 2
    assert [(result["sum"]["a"], result["mean"], result["max"]) for result in two] == [(3, 0.5, 1)] * 2
    assert two[0]["gathered"].tolist() == [0, 1]
    assert all("shares its trunk, on 2 ranks" in result["refused"] for result in two)
    for folder in ("one", "two"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder / "hf", dtype=torch.float64).state_dict()
        torch.testing.assert_close(saved["model.norm.weight"], one["weights"]["model.norm.weight"])
        assert (tmp_path / folder / "hf_critic" / "value_head.safetensors").is_file()


def test_what_args_say_is_what_a_strategy_does() -> None:
    strategy = get_strategy(Namespace(seed=9, max_norm=0.0))
    assert (strategy.seed, strategy.max_norm) == (9, 0.0)
    assert (strategy.world_size, strategy.get_rank(), strategy.is_rank_0()) == (1, 0, True)
    assert isinstance(get_strategy(Namespace(fsdp=True)), FSDPV2Strategy)
    assert (Strategy().seed, Strategy(5).seed, Strategy(Namespace(seed=6)).seed) == (42, 5, 6)
    with refused(ConfigError, "all_reduce"):
        strategy.all_reduce(1, "product")
