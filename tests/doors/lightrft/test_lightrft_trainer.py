"""PPOTrainerVL: its arithmetic, what it refuses, and the original's defects, which do not occur here."""

from __future__ import annotations

import copy
import itertools
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightrft_trainer_parts import (
    PROMPTS,
    SAMPLES,
    distance,
    experiences_of,
    fill,
    filled,
    load_double,
    loader,
    make_args,
    make_trainer,
    recorded,
    tiny_model,
    weights,
)
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForTokenClassification

from tests.failing import refused
from tests.rank_processes import run_ranks
from trivium.algorithms.kl import AdaptiveKLController
from trivium.algorithms.objective import Term
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import ConfigError, DataError, RunDirError
from trivium.frontdoors.lightrft.arguments import REQUIRED
from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.ppo_objective import high_entropy_mask, policy_objective, with_kl
from trivium.frontdoors.lightrft.objects.prompt_order import in_order
from trivium.frontdoors.lightrft.objects.strategy import get_strategy
from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL
from trivium.loops import train_step
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.models.vision.processor import hf_processor
from trivium.text.tiny_vision import TinyVisionModel
from trivium.training.distributed.fsdp import full_tensor
from trivium.training.engine import TorchTrainEngine
from trivium.training.learner import Learner
from trivium.types import Batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lightrft") / "model")


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return make_args(tmp_path / "checkpoints")


# --------------------------------------------------------------------------- what is refused


def test_unknown_keywords_are_one_error_with_suggestions(model: Path, args: Namespace) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(model, args, temprature=0.7, use_gpu=True)
    text = str(caught.value)
    assert "temprature, use_gpu" in text
    assert "did you mean 'temperature'?" in text


def test_missing_attributes_of_args_are_one_error(model: Path, args: Namespace) -> None:
    trainer = make_trainer(model, args)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Namespace(rollout_batch_size=4), loader(), None)
    assert all(name in str(caught.value) for name in REQUIRED if name != "rollout_batch_size")
    assert len(caught.value.problems) == len(REQUIRED) - 1


@pytest.mark.parametrize(
    ("changes", "further", "words"),
    [
        ({"advantage_estimator": "gae"}, {}, "no critic"),
        ({"advantage_estimator": "grppo"}, {}, "did you mean 'grpo'"),
        ({"n_samples_per_prompt": 1}, {}, "n_samples_per_prompt: 1"),
        ({"kl_estimator": "k9"}, {"reference": True}, "kl_estimator"),
        ({"overlong_buffer": True, "overlong_buffer_len": 9}, {}, "overlong_buffer_len: 9"),
        ({}, {"min_new_tokens": 3}, "max_new_tokens 2, min_new_tokens 3"),
        ({}, {"eps_clip": -1.0}, "objective"),
        ({}, {"micro_train_batch_size": 0}, "micro_train_batch_size 0"),
        ({}, {"micro_rollout_batch_size": 0, "ema_beta": 2.0}, "ema_beta 2.0"),
        ({}, {"value_clip": -0.1, "ptx_coef": -1, "max_norm": -1}, "ptx_coef -1, value_clip -0.1, max_norm -1"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: Path, args: Namespace, changes: dict[str, Any], further: dict[str, Any], words: str
) -> None:
    with refused(ConfigError, words):
        make_trainer(model, Namespace(**{**vars(args), **changes}), **further)


def test_models_and_tokenizers_that_are_not_there_are_named(model: Path, args: Namespace) -> None:
    strategy, plain = get_strategy(args), load_double(model)
    optimizer = torch.optim.AdamW(plain.parameters())
    parts = (None, None, None, None, optimizer, None, None, None)
    with refused(ConfigError, "ActorVL", "CriticVL"):
        PPOTrainerVL(strategy, plain, *parts)
    trainer = PPOTrainerVL(strategy, ActorVL(plain), *parts)  # trains on what is recorded without a tokenizer
    with refused(ConfigError, "tokenizer"):
        trainer.fit(args, loader(), None)


def test_batches_that_do_not_fit_are_refused(model: Path, args: Namespace) -> None:
    trainer = make_trainer(model, args)
    with refused(ConfigError, "train_batch_size 32", 16):
        trainer.fit(Namespace(**{**vars(args), "train_batch_size": 32}), loader(), None)
    with refused(ConfigError, "train_batch_size 5", 16):
        trainer.fit(Namespace(**{**vars(args), "train_batch_size": 5}), loader(), None)
    with refused(ConfigError, "batch_size", 3):
        trainer.fit(args, loader(batch_size=3), None)


# --------------------------------------------------------------------------- one step is the core's step


def _engine(trainer: PPOTrainerVL, directory: Path, mini_batches: int, epochs: int) -> tuple[TorchTrainEngine, Any]:
    """The core's engine with the algorithm, and the weights, of a trainer."""
    algorithm = with_kl(trainer.algorithm, trainer.kl_ctl.value)
    objectives = tuple(
        replace(each, kl=Term(trainer.kl_ctl.value, each.kl.function, each.kl.metadata))
        if getattr(each, "kl", None) is not None
        else each
        for each in algorithm.objectives
    )
    algorithm = replace(algorithm, objectives=objectives, mini_batches=mini_batches, epochs=epochs)
    config = {"device": "cpu", "dtype": "float64", "optimizer": {"lr": 1e-2, "betas": (0.9, 0.95)}}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config),
        model_dir=directory,
        algorithm=algorithm,
        temperature=0.7,
        max_response_length=2,
        total_steps=5,
        seed=0,
        threads=1,
    )
    engine.prepare()
    if trainer.critic is not None:
        engine._learner("critic").model.load_state_dict(trainer.critic.value_model.state_dict())
    return engine, algorithm


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_step_equals_the_core_step_on_the_same_groups(model: Path, args: Namespace, kind: str) -> None:
    ppo = kind == "ppo"
    args.advantage_estimator = "gae" if ppo else "group_norm"
    args.use_kl_loss, args.kl_estimator, args.train_batch_size = not ppo, "k1" if ppo else "k3", 8
    further = {"critic": ppo, "reference": True, "init_kl_coef": 0.1, "temperature": 0.7, "max_epochs": 2}
    trainer = make_trainer(load_double(model), args, directory=model, micro_train_batch_size=3, **further)
    engine, algorithm = _engine(trainer, model, mini_batches=2, epochs=2)
    for name, tensor in trainer.initial_model.model.state_dict().items():  # a reference that is not the policy
        tensor.add_(0.05 * torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(3)))
        engine._learner("reference").model.module.state_dict()[name].copy_(tensor)
    groups = recorded()
    metrics = train_step(engine, groups, algorithm)
    fill(trainer, groups)
    status = trainer.ppo_train(1)
    mine, theirs = weights(trainer), dict(engine.export_weights())
    assert distance(mine, theirs) < 1e-9
    assert status["actor_loss"] == pytest.approx(metrics["train/loss/policy"], abs=1e-9)
    if ppo:
        assert trainer.critic is not None
        critic = engine._learner("critic").model.state_dict()
        assert distance(dict(trainer.critic.value_model.state_dict()), critic) < 1e-9
        assert status["critic_loss"] == pytest.approx(metrics["train/loss/value"], abs=1e-9)
    else:
        assert status["kl_loss"] == pytest.approx(metrics["train/loss_term/kl"], abs=1e-9)
        assert status["kl"] == status["kl_loss"] > 0
    assert distance(mine, {name: tensor.double() for name, tensor in trainer.initial_model.export_weights()}) > 1e-3


def test_a_critic_of_transformers_is_trained_with_its_own_head(model: Path, args: Namespace) -> None:
    """Its parameters stay those of the optimizer; its values are those of its head."""
    args.advantage_estimator = "gae"
    classifier = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    trainer = make_trainer(model, args, critic_and_optimizer=(classifier, optimizer))
    assert isinstance(trainer.critic, CriticVL)
    fill(trainer, recorded())
    sequences = trainer.replay_buffer.items[0].sequences
    values = trainer.critic(sequences, 2).detach()
    with torch.no_grad():
        expected = classifier(sequences).logits[:, :-1, 0][:, -2:]
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    assert trainer.ppo_train(1)["critic_loss"] > 0
    moved = {name for name, tensor in classifier.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"score.weight", "score.bias"} & before.keys() <= moved
    assert len(moved) == len(before)


def test_a_step_of_fit_is_the_train_step_of_the_loops(model: Path, args: Namespace) -> None:
    """With its metrics, one version for each step, and `ppo_train` as its update."""
    seen: list[tuple[int, bool, int]] = []

    class Seen(PPOTrainerVL):
        def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
            seen.append((self.engine.version, self.engine.holds_version, len(self.replay_buffer)))
            return super().ppo_train(global_steps)

    trainer = make_trainer(model, args, cls=Seen)
    trainer.fit(args, loader(8), None)
    assert seen == [(0, False, 16), (1, False, 16)]
    assert (trainer.engine.version, trainer.engine.holds_version, trainer.metrics["train/version"]) == (2, True, 2)
    assert "time/update/rollout" in trainer.metrics


def test_without_the_learners_update_nothing_is_trained(
    model: Path, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = filled(model, args)
    monkeypatch.delattr(Learner, "update")
    with pytest.raises(AttributeError, match="update"):
        trainer.ppo_train(1)


def test_micro_batch_sizes_do_not_change_the_gradient(model: Path, args: Namespace) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for size in (1, 5, 16):
        trainer = filled(
            load_double(model), args, directory=model, micro_train_batch_size=size, micro_rollout_batch_size=size
        )
        trainer.ppo_train(1)
        results.append(weights(trainer))
    assert distance(results[0], results[1]) < 1e-12
    assert distance(results[0], results[2]) < 1e-12


# --------------------------------------------------------------------------- dispatch through self


class _NoActor(PPOTrainerVL):
    def training_step_actor(self, experience: Any, entropy_mask: Any = None) -> dict[str, float]:
        return {"policy_loss": 7.0}


class _NoCritic(PPOTrainerVL):
    def training_step_critic(self, experience: Any) -> dict[str, float]:
        return {"critic_loss": 7.0}


class _NoStep(PPOTrainerVL):
    def training_step(self, experience: Any, global_steps: int, entropy_mask: Any = None) -> dict[str, float]:
        return {"policy_loss": 7.0, "critic_loss": 7.0}


class _NoTraining(PPOTrainerVL):
    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        return {"policy_loss": 7.0, "critic_loss": 7.0}


@pytest.mark.parametrize(
    ("cls", "actor_moves", "critic_moves"),
    [(_NoActor, False, True), (_NoCritic, True, False), (_NoStep, False, False), (_NoTraining, False, False)],
)
def test_fit_calls_overrides(
    model: Path, args: Namespace, cls: type[PPOTrainerVL], actor_moves: bool, critic_moves: bool
) -> None:
    args.advantage_estimator = "gae"
    trainer = make_trainer(model, args, cls=cls, critic=True)
    assert trainer.critic is not None
    statuses: list[dict[str, float]] = []
    log = trainer.save_logs_and_checkpoints

    def keep(args: Any, step: int, bar: Any, logs: Any, *further: Any) -> None:
        statuses.append(dict(logs))
        log(args, step, bar, logs, *further)

    trainer.save_logs_and_checkpoints = keep  # pyright: ignore[reportAttributeAccessIssue]
    actor, critic = weights(trainer), {n: t.clone() for n, t in trainer.critic.value_model.state_dict().items()}
    trainer.fit(args, loader(4), None)
    assert (distance(actor, weights(trainer)) > 0) == actor_moves
    assert (distance(critic, dict(trainer.critic.value_model.state_dict())) > 0) == critic_moves
    assert (statuses[0]["policy_loss"] == 7.0) != actor_moves
    assert (statuses[0]["critic_loss"] == 7.0) != critic_moves


def test_an_experience_made_by_hand_is_trained_on(model: Path, args: Namespace) -> None:
    """Without fit, groups and info, and with nearly no args; every field that is missing is named."""
    args = Namespace(use_kl_loss=True, kl_estimator="k2")
    further: dict[str, Any] = {"reference": True, "init_kl_coef": 0.5, "max_norm": 0.0, "gradient_checkpointing": True}
    trainer = make_trainer(model, args, **further)
    generator = torch.Generator().manual_seed(0)
    experience = ExperienceVL(
        torch.randint(5, 15, (3, 7), generator=generator),
        action_log_probs=-torch.rand(3, 4, generator=generator) - 2,
        base_action_log_probs=-torch.rand(3, 4, generator=generator) - 2,
        advantages=torch.randn(3, 4, generator=generator),
        kl=torch.ones(3, 4),
        attention_mask=torch.ones(3, 7, dtype=torch.int64),
        action_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool(),
    )
    before = weights(trainer)
    status = trainer.training_step(experience, 1, entropy_mask=torch.ones(3, 4))
    assert status["actor_grad_norm"] > 0
    assert distance(before, weights(trainer)) > 1e-3
    with refused(DataError, "action_mask"):
        trainer.training_step_actor(experience, torch.ones(3, 3))
    experience.advantages = experience.action_log_probs = None
    with refused(DataError, "action_log_probs", "advantages"):
        trainer.training_step(experience, 1)


# --------------------------------------------------------------------------- losses, by the peers' own numbers

_A = {
    "log_prob": [[-1.0, -0.5, -2.0], [-0.2, -1.5, -0.7]],
    "old_log_prob": [[-1.2, -0.4, -1.0], [-0.9, -1.4, -0.7]],
    "ref_log_prob": [[-1.1, -0.9, -1.5], [-0.3, -1.0, -0.2]],
    "advantages": [[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]],
}


def _loss(trainer: PPOTrainerVL, mask: list[list[int]], counted: list[list[int]] | None = None) -> float:
    """The policy loss of the reference's numbers under the trainer's objective."""
    numbers = {name: torch.tensor(values) for name, values in _A.items()}
    trained = torch.tensor(mask).bool()
    columns = {
        **{n: numbers[n] for n in ("old_log_prob", "ref_log_prob", "advantages")},
        "rollout_log_prob": numbers["old_log_prob"],
    }
    totals = {"tokens": int(trained.sum()), "sequences": int(trained.any(1).sum())}
    if counted is not None:
        columns |= dict.fromkeys(("counted", "token_weight"), torch.tensor(counted).float())
        totals |= {"counted_tokens": int(columns["counted"].sum()), "counted_sequences": 2}
    inputs = LossInputs(
        trained, torch.zeros(2, 3, dtype=torch.int32), columns, log_prob=numbers["log_prob"], entropy=torch.zeros(2, 3)
    )
    objective = policy_objective(trainer.algorithm, 0.0, masked=counted is not None)
    return float(objective.loss(inputs, LossDenominators(max_response_length=3, **totals)).loss)


_ALL = [[1, 1, 1], [1, 1, 0]]


def test_losses_are_those_of_the_original(model: Path, args: Namespace) -> None:
    trainer = make_trainer(model, args)
    assert _loss(trainer, _ALL) == pytest.approx(-0.047296, abs=1e-6)
    assert _loss(trainer, _ALL, [[1, 0, 0], [0, 1, 0]]) == pytest.approx(-0.373791, abs=1e-6)
    cpgd = make_trainer(model, Namespace(**vars(args), use_cpg_loss=True))
    assert _loss(cpgd, _ALL) == pytest.approx(0.373780, abs=1e-6)
    assert np.isfinite(_loss(trainer, [[1, 1, 1], [0, 0, 0]])), "a row without a trained token"
    with refused(ConfigError, "use_gspo", "use_cpg_loss"):
        make_trainer(model, Namespace(**vars(args), use_cpg_loss=True, use_gspo=True))


def test_high_entropy_mask_is_per_sequence() -> None:
    entropy = torch.tensor([[0.1, 0.5, 0.3, 0.9, 0.2], [0.7, 0.6, 0.1, 0, 0], [0.0] * 5])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0] * 5])
    for ratio, rows in ((0.2, [[3], [0], []]), (0.4, [[1, 3], [0], []]), (0.5, [[1, 3], [0], []])):
        chosen = [torch.nonzero(row).flatten().tolist() for row in high_entropy_mask(entropy, mask, ratio)]
        assert chosen == rows
    for ratio in (0.0, 1.0):
        assert torch.equal(high_entropy_mask(entropy, mask, ratio), mask.bool())


def test_high_entropy_ratio_is_applied(model: Path, args: Namespace) -> None:
    """In the original it never was: actors knew the ratio, the trainer did not."""
    masks: list[torch.Tensor] = []

    class Seen(PPOTrainerVL):
        def training_step_actor(self, experience: Any, entropy_mask: Any = None) -> dict[str, float]:
            masks.append(entropy_mask)
            return super().training_step_actor(experience, entropy_mask)

    trained: list[dict[str, torch.Tensor]] = []
    for ratio in (0.0, 0.4):
        trainer = make_trainer(model, Namespace(**vars(args), high_entropy_token_ratio=ratio), cls=Seen)
        fill(trainer, recorded())
        trainer.ppo_train(1)
        trained.append(weights(trainer))
    lengths = [int(item.action_mask.sum()) for item in trainer.replay_buffer.items]
    assert masks[0] is None
    assert masks[1].sum(1).tolist() == [max(1, int(0.4 * length)) for length in lengths]
    assert distance(*trained) > 1e-4


def test_adaptive_kl_is_steered_by_fit_and_saved(model: Path, args: Namespace) -> None:
    args.use_kl_loss, args.save_steps = True, 1
    further: dict[str, Any] = {"reference": True, "init_kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 100}
    trainer = make_trainer(model, args, **further)
    trainer.fit(args, loader(8), None)
    assert isinstance(trainer.kl_ctl, AdaptiveKLController)
    assert trainer.kl_ctl.value == pytest.approx(0.1 * (1 - 0.2 * 16 / 100) ** 2)
    again = make_trainer(model, args, **further)
    again.fit(Namespace(**{**vars(args), "num_episodes": 1}), loader(8), None, consumed_samples=8)
    assert again.kl_ctl.value == trainer.kl_ctl.value


def test_the_kl_of_a_status_is_that_of_the_reference(model: Path, args: Namespace) -> None:
    """It steers the adaptive coefficient; how far a step moved the policy is `ppo_kl`."""
    args.advantage_estimator = "reinforce"
    trainer = make_trainer(model, args, reference=True)
    with torch.no_grad():
        for parameter in trainer.initial_model.model.parameters():
            parameter.mul_(1.3)
    fill(trainer, recorded())
    items = trainer.replay_buffer.items
    estimates = torch.cat([item.kl[item.action_mask] for item in items])
    assert trainer.ppo_train(1)["kl"] == pytest.approx(float(estimates.mean()), abs=1e-5)


def test_the_kl_penalty_is_in_the_reward_without_use_kl_loss(model: Path, args: Namespace) -> None:
    args.advantage_estimator, args.no_advantage_std_norm = "reinforce", True
    returns: list[float] = []
    for coef in (0.0, 1.0):
        trainer = make_trainer(model, args, reference=True, init_kl_coef=coef)
        with torch.no_grad():
            for parameter in trainer.initial_model.model.parameters():
                parameter.mul_(1.3)
        fill(trainer, recorded())
        items = trainer.replay_buffer.items
        expected = [float(item.info["reward"][0] - coef * item.kl[item.action_mask].sum()) for item in items]
        assert [float(item.info["return"][0]) for item in items] == pytest.approx(expected, abs=1e-4)
        returns.append(sum(expected))
    assert returns[0] != pytest.approx(returns[1])


# --------------------------------------------------------------------------- pretraining


def _supervised(rows: int = 3) -> list[tuple[Any, ...]]:
    """Batches of the pretraining loader: (lengths, ids, mask, pixels, grids)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 15, (rows, 1, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 0, :2] = 0
    return [(torch.tensor([6] * rows), ids, mask, None, None)]


def _keep_gradient(module: torch.nn.Module, kept: list[torch.Tensor]) -> None:
    kept.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))


def test_pretraining_is_in_the_same_optimizer_step(model: Path, args: Namespace) -> None:
    """The gradient is that of the policy loss plus ptx_coef times the mean next-token loss."""
    coef, gradients = 0.5, list[torch.Tensor]()
    batch = _supervised()[0]
    for pretrained in (False, True):
        trainer = make_trainer(load_double(model), args, directory=model, ptx_coef=coef, max_norm=1e9)
        step = partial(_keep_gradient, trainer.actor.model, gradients)
        trainer.actor_optim.step = step  # pyright: ignore[reportAttributeAccessIssue]
        fill(trainer, recorded())
        trainer.pretrain_dataloader = itertools.cycle([batch]) if pretrained else None
        status = trainer.ppo_train(1)
    plain = load_double(model)
    labels = batch[1][:, 0].masked_fill(batch[2][:, 0] == 0, -100)
    position = (batch[2][:, 0].cumsum(-1) - 1).clamp(min=0)
    logits = plain(input_ids=batch[1][:, 0], attention_mask=batch[2][:, 0], position_ids=position).logits
    labels[0, 2] = -100  # nothing precedes the first token
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    loss = float(loss.detach())
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert len(gradients) == 2
    assert torch.allclose(gradients[1] - gradients[0], coef * expected, atol=1e-6)  # norms are float32
    assert status["ptx_loss"] == pytest.approx(loss, abs=1e-6)
    assert status["policy_loss"] == pytest.approx(status["actor_loss"] - coef * loss, abs=1e-6)


def test_the_pretraining_loader_is_read_over_and_over(model: Path, args: Namespace) -> None:
    args.train_batch_size = 4
    trainer = make_trainer(model, args, ptx_coef=0.1)
    trainer.fit(args, loader(4), _supervised())  # a loader of one batch, and four steps
    assert trainer.pretrain_dataloader is not None
    assert trainer.pretrain_dataloader.consumed == 4  # pyright: ignore[reportAttributeAccessIssue]
    with refused(DataError, "pixel values"):
        trainer.fit(args, loader(4), [(None, *_supervised()[0][1:3], torch.ones(2, 3), None)])


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyVisionModel.Config(alphabet="0123456789", layers=1, hidden=32, heads=2, mlp=16, max_position=32)
    return TinyVisionModel(sizes, seed=0).materialize(tmp_path_factory.mktemp("lightrft") / "vision")


def test_an_override_sees_what_the_original_shows_it(vision_model: Path, args: Namespace) -> None:
    """Pixels of the rows that have images, the images themselves, labels and references."""
    seen: list[Any] = []

    class Seeing(PPOTrainerVL):
        def training_step_actor(self, experience: Any, entropy_mask: Any = None) -> dict[str, float]:
            seen.append(experience)
            patches, grids = experience.pixel_values, experience.image_grid_thws
            with torch.no_grad():
                scores = self.actor(
                    experience.sequences, experience.num_actions, experience.attention_mask, patches, grids
                )
            assert torch.allclose(scores[experience.action_mask], _of_actions(experience), atol=1e-5)
            return super().training_step_actor(experience, entropy_mask)

    shown = "<|user|><|vision_start|><|image_pad|><|vision_end|>1<|end|><|assistant|>"
    texts = [shown, "<|user|>2<|end|><|assistant|>", shown, shown]
    pictures = [
        Image.new("RGB", (28, 28), "red"),
        None,
        [Image.new("RGB", (56, 28), "blue")],
        Image.new("RGB", (28, 28)),
    ]
    how: dict[str, Any] = {"processor": hf_processor(vision_model), "prompt_max_len": 32, "micro_rollout_batch_size": 3}
    trainer = make_trainer(vision_model, args, cls=Seeing, **how)
    trainer.fit(args, [(texts, pictures, ["1", "2", "3", "4"], ["a", "b", "c", "d"])], None)
    (experience,) = seen
    assert experience.image_num == [1] * SAMPLES + [0] * SAMPLES + [1] * 2 * SAMPLES
    assert len(experience.image_grid_thws) == 3 * SAMPLES
    assert [image.size for image in experience.raw_images[2 * SAMPLES]] == [(56, 28)]
    assert experience.labels == [label for label in "abcd" for _ in range(SAMPLES)]
    assert experience.references == [reference for reference in "1234" for _ in range(SAMPLES)]


def _of_actions(experience: ExperienceVL) -> torch.Tensor:
    assert experience.action_log_probs is not None
    return experience.action_log_probs[experience.action_mask]


def test_a_processor_that_reads_images_otherwise_than_the_model_is_refused(vision_model: Path, args: Namespace) -> None:
    """The rollout engine and training read images with the processor of the model's directory."""
    processor = hf_processor(vision_model)
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
    with refused(ConfigError, "processor"):
        make_trainer(vision_model, args, processor=processor)


def test_keywords_without_effect_are_announced_and_unsupported_attributes_of_args_refused(
    model: Path, args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "trivium"):
        make_trainer(model, Namespace(**vars(args), mine=object(), use_fire=False), packing_samples=True)
    assert "packing_samples: no effect: sequences are always packed" in caplog.text
    with refused(ConfigError, "use_fire", "aux_loss_coef"):
        make_trainer(model, Namespace(**vars(args), use_fire=True, aux_loss_coef=0.1))


def test_pretraining_reads_images(vision_model: Path, args: Namespace) -> None:
    """One batch (lengths, ids, mask, pixels, grids), the first row with an image: its loss is that of transformers over
    what is no placeholder."""
    processor = hf_processor(vision_model)
    trainer = make_trainer(vision_model, args, ptx_coef=0.5, processor=processor)
    shown = "<|user|><|vision_start|><|image_pad|><|vision_end|>12<|end|>"
    texts = [shown, "<|user|>3456789012<|end|>"]
    picture = Image.new("RGB", (28, 28), "red")
    inputs = processor(text=texts, images=[picture], padding=True, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = ids.masked_fill((mask == 0) | (ids == trainer.actor.vision.placeholder), -100)
    for row, attended in enumerate(mask):
        labels[row, int(attended.argmax())] = -100  # nothing precedes the first token
    with torch.no_grad():
        logits = trainer.actor.model(**inputs).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    trainer.pretrain_dataloader = iter([(None, ids, mask, inputs["pixel_values"], inputs["image_grid_thw"])])
    fill(trainer, recorded())
    assert trainer.ppo_train(1)["ptx_loss"] == pytest.approx(float(expected), abs=1e-5)


def test_freezing_actor_steps(model: Path, args: Namespace) -> None:
    args.advantage_estimator, args.freezing_actor_steps = "gae", 1
    trainer = make_trainer(model, args, critic=True)
    before = weights(trainer)
    fill(trainer, recorded())
    assert "policy_loss" not in trainer.ppo_train(1)
    assert distance(before, weights(trainer)) == 0
    assert "policy_loss" in trainer.ppo_train(2)


class _OwnUpdate(PPOTrainerVL):
    """Changes the actor's weights without the base class."""

    def training_step_actor(
        self, experience: ExperienceVL, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        _shift(self)
        return {"policy_loss": 0.0}


def _shift(trainer: PPOTrainerVL) -> None:
    with torch.no_grad():
        for parameter in trainer.actor.parameters():
            parameter.add_(0.1)


@pytest.fixture
def sampled_with(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest weight that the rollout engine has loaded, at each completion."""
    loaded, sampled = [0.0], list[float]()
    load, generate = TorchEngine.load, TorchEngine.generate

    async def recorded_load(engine: TorchEngine, version: int, weights: Any, **how: Any) -> None:
        kept = list(weights)
        loaded.append(max(float(tensor.detach().max()) for _, tensor in kept))
        await load(engine, version, kept, **how)

    async def recorded_generate(engine: TorchEngine, request: Any, *given: Any) -> Any:
        sampled.append(loaded[-1])
        return await generate(engine, request, *given)

    monkeypatch.setattr(TorchEngine, "load", recorded_load)
    monkeypatch.setattr(TorchEngine, "generate", recorded_generate)
    return sampled


def _largest(trainer: PPOTrainerVL) -> float:
    return max(float(tensor.detach().max()) for tensor in weights(trainer).values())


def test_rollouts_follow_an_override_that_updates_the_weights_itself(
    model: Path, args: Namespace, sampled_with: list[float]
) -> None:
    trainer = make_trainer(model, args, cls=_OwnUpdate)
    trainer.fit(args, loader(8), None)
    assert len(sampled_with) == 2 * PROMPTS * SAMPLES
    assert sampled_with[-1] == pytest.approx(_largest(trainer) - 0.1, abs=1e-4)


def test_rollouts_follow_weights_that_are_loaded_after_an_evaluation(
    model: Path, args: Namespace, sampled_with: list[float]
) -> None:
    trainer = make_trainer(model, args, cls=_NoTraining)
    trainer.evaluate(loader(4), 0)
    evaluated = sampled_with[-1]
    _shift(trainer)  # as a checkpoint changes the weights in place
    trainer.fit(args, loader(4), None)
    assert sampled_with[-1] == pytest.approx(evaluated + 0.1, abs=1e-4)


# --------------------------------------------------------------------------- rewards and advantages


def _advantages(trainer: PPOTrainerVL) -> torch.Tensor:
    rows = [item.advantages[item.action_mask] for item in trainer.replay_buffer.items]
    return torch.cat(rows).double()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("estimator", ["reinforce", "reinforce++", "reinforce_baseline", "gae"])
def test_advantages_are_normalised_once_over_the_rollout(
    model: Path, args: Namespace, estimator: str, norm: bool
) -> None:
    args.advantage_estimator, args.advantages_norm = estimator, norm
    sizes = (2, 16)
    results: list[torch.Tensor] = []
    for size in sizes:
        trainer = filled(model, args, critic=estimator == "gae", micro_rollout_batch_size=size)
        results.append(_advantages(trainer))
    assert float(results[0].mean()) == pytest.approx(0, abs=1e-6)
    assert float(results[0].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert torch.allclose(results[0], results[1], atol=1e-6), "not of micro-batches"


def test_group_estimators_are_not_normalised_again(model: Path, args: Namespace) -> None:
    """`grpo` is another name of `group_norm`; the original normalised the one and not the other."""
    results: dict[str, torch.Tensor] = {}
    for name in ("group_norm", "grpo", "cpgd"):
        args.advantage_estimator = name
        trainer = filled(model, args)
        results[name] = _advantages(trainer)
    assert torch.equal(results["group_norm"], results["grpo"])
    firsts = torch.tensor([float(i.advantages[0, 0]) for i in trainer.replay_buffer.items]).reshape(PROMPTS, SAMPLES)
    assert torch.allclose(firsts.std(1, correction=0), torch.ones(PROMPTS), atol=1e-4), "cpgd learns"


def test_the_discount_holds_in_every_micro_batch(model: Path, args: Namespace) -> None:
    args.advantage_estimator, args.no_advantage_std_norm = "reinforce", True
    trainer = filled(model, args, gamma=0.5, micro_rollout_batch_size=2)
    for item in trainer.replay_buffer.items:
        length = int(item.action_mask.sum())
        expected = [float(item.info["reward"][0]) * 0.5 ** (length - 1 - t) for t in range(length)]
        assert item.returns[item.action_mask].tolist() == pytest.approx(expected, abs=1e-6)


def test_rewards_are_shaped_in_order(model: Path, args: Namespace) -> None:
    """Overlong penalty (of at most the factor), running norm, clip; then the estimator. The log has the raw reward."""
    args.advantage_estimator, args.no_advantage_std_norm = "reinforce", True
    args.overlong_buffer, args.overlong_buffer_len, args.overlong_buffer_penalty_factor = True, 2, 3.0
    args.reward_running_norm, args.reward_clip = True, 1.5
    trainer = filled(model, args, max_new_tokens=4)
    items = trainer.replay_buffer.items
    raw = np.array([float(item.info["reward"][0]) for item in items])
    length = np.array([int(item.action_mask.sum()) for item in items])
    penalised = raw - 3.0 * np.clip((length - 2) / 2, 0, 1)
    shaped = np.clip(penalised / penalised.std(ddof=1), -1.5, 1.5)
    assert max(length) > 4, "some are longer than any completion can be"
    assert [float(item.returns[item.action_mask][0]) for item in items] == pytest.approx(shaped.tolist(), abs=1e-5)
    moments = trainer.algorithm.state()["moments"][0]
    assert moments["count"] == 16


def test_one_reward_has_no_infinite_spread(model: Path, args: Namespace) -> None:
    args.advantage_estimator, args.no_advantage_std_norm, args.reward_running_norm = "reinforce", True, True
    trainer = make_trainer(model, args)
    fill(trainer, recorded(members=1)[:1])
    (item,) = trainer.replay_buffer.items
    assert float(item.returns[0, 0]) == pytest.approx(float(item.info["reward"][0]))


def test_a_row_without_a_trained_token_changes_nothing(model: Path, args: Namespace) -> None:
    trained: list[dict[str, torch.Tensor]] = []
    args.train_batch_size = 20
    for masked in (False, True):
        trainer = filled(load_double(model), args, directory=model)
        if masked:
            blank = copy.copy(trainer.replay_buffer.items[0])
            blank.action_mask = torch.zeros_like(blank.action_mask)
            trainer.replay_buffer.items.append(blank)
        status = trainer.ppo_train(1)
        assert np.isfinite(status["policy_loss"])
        trained.append(weights(trainer))
    assert distance(*trained) < 1e-12


@pytest.mark.parametrize(
    "how", [{"min_new_tokens": 8}, {"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.9, "top_k": 9, "min_new_tokens": 5}]
)
def test_what_tokens_were_sampled_among_is_replayed(model: Path, args: Namespace, how: dict[str, Any]) -> None:
    """Engine and trainer agree, and the first update sees ratios of 1; over the whole vocabulary they would not."""
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.8, "prompt_max_len": 16, **how}
    trainer = make_trainer(model, args, reference=True, **options)
    sampling: dict[str, Any] = {"samples": SAMPLES, "sampling": trainer.sampling}
    groups = trainer.experience_maker.generate(next(iter(loader())), 0, purpose="train", version=0, **sampling)
    experiences = experiences_of(trainer, groups, 3)
    joined = ExperienceVL.join([row for each in experiences for row in each.split()])
    for experience in (*experiences, joined):
        batch = experience.to_batch()
        rolled_out = [e.rollout_log_prob for e in batch.experiences]
        gaps = [
            np.abs(one - other)[e.response_mask].max()
            for e, one, other in zip(batch.experiences, rolled_out, batch.columns["old_log_prob"], strict=True)
        ]
        assert max(gaps) < 2e-5
        assert experience.kl is not None
        assert float(experience.kl.abs().max()) < 1e-6, "the reference is the same model, over the same tokens"
        bare = Batch(tuple(replace(e, extra={}) for e in batch.experiences))
        scored = trainer.engine.score(bare, "old")
        rows = zip(bare.experiences, rolled_out, scored, strict=True)
        assert max(np.abs(a - b)[e.response_mask].max() for e, a, b in rows) > 1e-3
    trainer.replay_buffer.append(joined)
    assert abs(trainer.ppo_train(1)["ppo_kl"]) < 1e-6
    trainer.close()


def test_dynamic_sampling_replaces_prompts_that_teach_nothing(model: Path, args: Namespace) -> None:
    """As DAPO means it: not masks on a block of sequences, but other prompts."""
    args.dynamic_sampling, args.dynamic_sampling_refills = True, 1
    seen: list[int] = []

    def rewards(_m: Any, _l: Any, queries: Any, refs: Any, _map: Any) -> torch.Tensor:
        counts = {ref: itertools.count() for ref in refs}
        return torch.tensor([float(next(counts[ref])) if int(ref) % 2 else 1.0 for ref in refs])

    class Seen(PPOTrainerVL):
        def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
            seen.append(len(self.replay_buffer))
            return super().ppo_train(global_steps)

    trainer = make_trainer(model, args, cls=Seen, reward_fn=rewards)
    states: list[Any] = []
    log = trainer.save_logs_and_checkpoints
    trainer.save_logs_and_checkpoints = lambda *given: (states.append(given[4]), log(*given))  # pyright: ignore
    trainer.fit(args, loader(12, shuffle=False), None)
    assert seen == [16, 8], "two batches gave 4 prompts, and the last batch could not be topped up"
    assert [state["consumed_samples"] for state in states] == [8, 12]


# --------------------------------------------------------------------------- evaluation, logs, checkpoints, resume


def test_evaluation_reads_all_and_does_not_disturb(model: Path, args: Namespace) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        trainer = make_trainer(model, args)
        assert trainer.evaluate(None, 0) == {}
        if evaluates:
            args.eval_steps, args.eval_n_samples = 1, 2
        trainer.fit(args, loader(8), None, eval_dataloader=loader(5, 2) if evaluates else None)
        results.append(weights(trainer))
    assert distance(*results) == 0
    state = torch.random.get_rng_state()
    measured = trainer.evaluate(loader(5, 2), 1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert measured["num_samples"] == 10, "the last batch is smaller"
    assert set(measured) == {
        *("reward_mean", "format_reward_mean", "accuracy_reward_mean", "response_length_mean", "num_samples")
    }
    assert measured["accuracy_reward_mean"] == measured["reward_mean"]
    assert trainer.evaluate(loader(5, 2), 1) == measured
    trainer.close()


def test_completions_are_sampled_in_micro_batches(
    model: Path, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`micro_rollout_batch_size` bounds the completions that the engine samples at a time."""
    running, most = 0, 0
    generate = TorchEngine.generate

    async def counted(engine: TorchEngine, request: Any, *given: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await generate(engine, request, *given)
        finally:
            running -= 1

    monkeypatch.setattr(TorchEngine, "generate", counted)
    for size in (1, 3):
        most = 0
        trainer = make_trainer(model, args, micro_rollout_batch_size=size)
        trainer.evaluate(loader(4), 0)
        trainer.close()
        assert most == size


def test_resume_is_exact(model: Path, args: Namespace, tmp_path: Path) -> None:
    """Two steps, a new process' objects, two more: the weights of four steps, bit for bit; averages and optimizers,
    the place in data and pretraining data, and the KL coefficient included."""
    args.advantage_estimator, args.num_episodes, args.reward_running_norm = "gae", 2, True
    args.max_ckpt_num = 1
    further: dict[str, Any] = {"critic": True, "reference": True, "ema": True, "ptx_coef": 0.1, "kl_target": 0.01}

    def supervised() -> list[Any]:
        return [*_supervised(2), *_supervised(3), *_supervised(4)]

    class Killed(PPOTrainerVL):
        def save_logs_and_checkpoints(self, args: Any, global_step: int, *given: Any) -> None:
            super().save_logs_and_checkpoints(args, global_step, *given)
            if args.save_steps == 2 and global_step == 3:
                raise KeyboardInterrupt  # a step beyond the checkpoint

    whole = make_trainer(model, args, **further)
    whole.fit(args, loader(8), supervised())
    args.save_steps, args.ckpt_path = 2, str(tmp_path / "second")
    first = make_trainer(model, args, cls=Killed, **further)
    with pytest.raises(KeyboardInterrupt):
        first.fit(args, loader(8), supervised())
    second = make_trainer(model, args, **further)
    assert [path.name for path in Path(args.ckpt_path).iterdir()] == ["step-000002"]
    args.save_steps = -1
    second.fit(args, loader(8), supervised(), consumed_samples=8)
    assert distance(weights(whole), weights(second)) == 0
    for name in ("critic", "ema_model"):
        one, other = (getattr(trainer, name).state_dict() for trainer in (whole, second))
        assert distance(one, other) == 0
    assert second.kl_ctl.value == whole.kl_ctl.value


def test_a_pass_continues_in_the_order_of_its_sampler() -> None:
    """Each rank reads its share of a pass, in another order than that of the pass before."""
    passes: list[list[int]] = []
    for number in range(2):
        ranks: list[list[Any]] = []
        for rank in range(2):
            sampler = DistributedSampler(range(16), num_replicas=2, rank=rank, seed=3)  # pyright: ignore
            data = DataLoader(range(16), 2, sampler=sampler)  # pyright: ignore
            ranks.append([batch.tolist() for batch in in_order(data, 0, "prompts", number)])
            continued = in_order(data, 0, "prompts", number, consumed=8, batch_size=4)
            assert [batch.tolist() for batch in continued] == ranks[-1][2:]
        passes.append([sample for batches in ranks for batch in batches for sample in batch])
        assert sorted(passes[-1]) == [*range(16)]
    assert passes[0] != passes[1]


def test_a_data_position_that_fit_is_not_told_is_found(model: Path, args: Namespace) -> None:
    """The original's scripts loaded a checkpoint and called fit with consumed_samples 0: data began from the front."""
    args.save_steps = 1
    make_trainer(model, args).fit(args, loader(4), None)
    args.load_checkpoint, args.num_episodes = True, 1
    steps: list[int] = []

    class Seen(PPOTrainerVL):
        def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
            steps.append(global_steps)
            return super().ppo_train(global_steps)

    make_trainer(model, args, cls=Seen).fit(args, loader(8), None)
    assert steps == [2]
    with refused(ConfigError, "rollout_batch_size 4", "consumed_samples"):
        make_trainer(model, args).fit(args, loader(8), None, consumed_samples=3)


def test_a_run_does_not_save_beside_later_checkpoints(model: Path, args: Namespace) -> None:
    """Retention goes by the step: the new checkpoints would be removed, and a later resume would take the old ones."""
    args.save_steps, args.max_ckpt_num = 1, 1
    make_trainer(model, args).fit(args, loader(8), None)
    folder = Path(args.ckpt_path)
    with refused(RunDirError, folder, "ckpt_path", "load_checkpoint"):
        make_trainer(model, args).fit(args, loader(4), None)
    with refused(RunDirError, folder):
        make_trainer(model, args).fit(args, loader(8), None, consumed_samples=4)
    assert [path.name for path in folder.glob("step-*")] == ["step-000002"]
    make_trainer(model, args, disable_ds_ckpt=True).fit(args, loader(4), None)
    make_trainer(model, args).fit(args, loader(12), None, consumed_samples=8)
    assert [path.name for path in folder.glob("step-*")] == ["step-000003"]


def test_checkpoints_are_of_all_roles_and_directories_of_the_actor(model: Path, args: Namespace) -> None:
    args.advantage_estimator, args.save_steps, args.max_ckpt_num = "gae", 1, 2
    trainer = make_trainer(model, args, critic=True, save_hf_ckpt=True)
    trainer.fit(args, loader(12), None)
    folder = Path(args.ckpt_path)
    saved = sorted(folder.glob("step-*"))
    assert [path.name for path in saved] == ["step-000002", "step-000003"]
    assert {f"{role}.safetensors" for role in ("policy", "critic")} < {path.name for path in saved[0].iterdir()}
    assert distance(weights(make_trainer(folder / "global_step3_hf", make_args(folder))), weights(trainer)) == 0


def test_batches_of_five_columns_and_videos(model: Path, args: Namespace) -> None:
    rows = [("<|user|>1<|end|><|assistant|>", None, None, "1", "rule")] * 4
    columns = tuple(list(column) for column in zip(*rows, strict=True))
    trainer = make_trainer(model, args)
    trainer.fit(args, [columns], None)
    with refused(DataError, "videos"):
        trainer.fit(args, [(columns[0], columns[1], ["clip.mp4"] * 4, columns[3], columns[4])], None)
    with refused(DataError, "3 columns"):
        trainer.fit(args, [columns[:3]], None)


# --------------------------------------------------------------------------- ranks


def _trained_alone(rank: int, size: int, directory: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The actor after a step of `fit` whose groups the first rank has, and no other one."""
    args = make_args(folder, train_batch_size=8 * size, reward_running_norm=True)
    trainer = make_trainer(load_double(directory), args, directory=directory)
    status = trainer._trained(recorded() if rank == 0 else [], 1)
    moments = trainer.algorithm.state()["moments"][0]
    numbers = {"samples": status["rollout_samples"], "reward": status["rollout_reward"], "count": moments["count"]}
    assert numbers["samples"] == numbers["count"] == 16
    return {**weights(trainer), **{name: torch.tensor(number) for name, number in numbers.items()}}


def _trained_on_ranks(rank: int, size: int, directory: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The actor and the critic after one `ppo_train`, on this rank's share of the groups."""
    args = make_args(folder, advantage_estimator="gae", train_batch_size=8, micro_train_batch_size=2)
    trainer = make_trainer(
        load_double(directory),
        args,
        directory=directory,
        critic=True,
        reference=True,
        init_kl_coef=0.1,
        temperature=0.7,
    )
    groups = recorded()
    # Each mini-batch of one process is one of all ranks: half of the groups of either half.
    order = [0, 2, 1, 3] if size == 2 else [0, 1, 2, 3]
    share = [groups[i] for i in order][rank * 4 // size : (rank + 1) * 4 // size]
    fill(trainer, share)
    status = trainer.ppo_train(1)
    assert trainer.critic is not None
    critic = {f"critic.{n}": full_tensor(t).clone() for n, t in trainer.critic.value_model.state_dict().items()}
    numbers = {name: torch.tensor(status[name]) for name in ("reward", "policy_loss", "critic_loss", "kl")}
    return {**weights(trainer), **critic, **numbers}


@pytest.mark.parametrize("train", [_trained_on_ranks, _trained_alone])
def test_two_ranks_equal_one_process(model: Path, tmp_path: Path, train: Any) -> None:
    results = run_ranks([1, 2], train, tmp_path / "ranks", model, tmp_path / "checkpoints")
    (alone,) = results[1]
    for of_rank in results[2]:
        assert distance(alone, of_rank) < 1e-9
