"""Each fact of the API document of LightRFT's PPOTrainerVL, once: (id, what holds here, a check).

A fact that differs here on purpose has a wording that begins with REFUSED, and its check asserts the refusal.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_documents import check_parameters
from lightrft_trainer_parts import distance, fill, loader, make_args, recorded, tiny_model, weights

from tests.failing import refused
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft import ActorVL, CriticVL, ExperienceVL, PPOTrainerVL, get_strategy
from trivium.frontdoors.lightrft.objects.ppo_objective import critic_objective
from trivium.frontdoors.lightrft.rewards.reward_scoring import RolloutSample
from trivium.text import hf_tokenizer

REFUSED = "REFUSED: "
PPO: dict[str, Any] = {"advantage_estimator": "gae"}


def mean_of(scores: list[torch.Tensor]) -> torch.Tensor:
    """A reward function as the document types it: from the scores of the models."""
    return torch.stack(scores).mean(0)


def even(_models: Any, _labels: Any, queries: list[str], _refs: Any, _map: Any) -> Any:
    """A reward function of five arguments, as the original calls it."""
    rewards = torch.tensor([float(len(query) % 2) for query in queries])
    return rewards, {"accuracy_reward": rewards}


class Watched(PPOTrainerVL):
    """Records the calls that reach an override, and their results."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        super().__init__(*given, **named)

    def results(self, name: str) -> list[Any]:
        return [result for called, _, result in self.calls if called == name]

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        return [given for called, given, _ in self.calls if called == name]


def _watching(name: str) -> Callable[..., Any]:
    def method(self: Watched, *given: Any, **named: Any) -> Any:
        result = getattr(super(Watched, self), name)(*given, **named)
        self.calls.append((name, (*given, *named.values()), result))
        return result

    return method


METHODS = (
    *("ppo_train", "training_step", "training_step_actor", "training_step_critic"),
    *("evaluate", "save_logs_and_checkpoints"),
)
for _name in METHODS:
    setattr(Watched, _name, _watching(_name))


class Facts:
    """Trainers of a tiny model, and one run of `fit` with all that it can be given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, tiny_model(folder / "model")
        self.tokenizer = hf_tokenizer(self.model)

    def trainer(self, args: dict[str, Any] | None = None, cls: type[Any] = PPOTrainerVL, **given: Any) -> Any:
        """A trainer with these arguments of the constructor, and attributes of `args`."""
        settings = make_args(
            self.folder / "checkpoints", **{"train_batch_size": 8, "rollout_batch_size": 2, **(args or {})}
        )
        settings.n_samples_per_prompt = 4
        actor = given.pop("actor", None) or ActorVL(self.model)
        parts: dict[str, Any] = {
            "strategy": get_strategy(settings),
            "actor": actor,
            **dict.fromkeys(("critic", "reward_model", "initial_model", "ema_model", "critic_optim")),
            **dict.fromkeys(("actor_scheduler", "critic_scheduler")),
            "actor_optim": torch.optim.SGD(actor.model.parameters(), lr=0.1),
            "tokenizer": self.tokenizer,
            "prompt_max_len": 16,
            "max_new_tokens": 2,
        }
        rewards = {"reward_model", "reward_fn", "reward_recipe", "remote_rm_url"} & given.keys()
        return cls(**{**parts, **({} if rewards else {"reward_fn": even}), **given})

    def filled(self, args: dict[str, Any] | None = None, **given: Any) -> Any:
        """A trainer whose buffer has eight recorded sequences."""
        trainer = self.trainer(args, **given)
        fill(trainer, recorded(members=2))
        return trainer

    def scored(self, count: int = 2, **given: Any) -> list[float]:
        """The rewards of samples with the label `math` by a trainer's arguments."""
        tokens = np.arange(4, dtype=np.int32)
        sample = RolloutSample("1+1?", "\\boxed{2}", "1+1?\\boxed{2}", tokens, tokens[2:], label="math", reference="2")
        return self.trainer(**given).rewards.score([sample] * count).rewards.tolist()

    @cached_property
    def before(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in ActorVL(self.model).export_weights()}

    @cached_property
    def run(self) -> Watched:
        """The trainer after `fit`: two rollouts of two passes, with critic, reference, average and supervised rows."""
        actor, critic = ActorVL(self.model), CriticVL(self.model)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (actor, critic)]
        schedulers = [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers]
        self.critic_before = {name: tensor.clone() for name, tensor in critic.value_model.state_dict().items()}
        further = {"eval_steps": 1, "save_steps": 1, "use_tensorboard": str(self.folder / "logs")}
        trainer = self.trainer(
            {**PPO, **further},
            Watched,
            actor=actor,
            critic=critic,
            initial_model=ActorVL(self.model),
            ema_model=ActorVL(self.model),
            actor_optim=optimizers[0],
            critic_optim=optimizers[1],
            actor_scheduler=schedulers[0],
            critic_scheduler=schedulers[1],
            ptx_coef=0.5,
            max_epochs=2,
            save_hf_ckpt=True,
        )
        ids = torch.arange(5, 11)[None, None]
        supervised = [(torch.tensor([6]), ids, torch.ones_like(ids), None, None)]
        self.returned = trainer.fit(trainer.strategy.args, loader(4, 2), supervised, loader(2, 2))
        return trainer

    @cached_property
    def status(self) -> dict[str, float]:
        """What the run logged for its last rollout."""
        return dict(self.run.arguments("save_logs_and_checkpoints")[-1][3])

    @cached_property
    def logged(self) -> dict[str, list[int]]:
        """The names that the run wrote to TensorBoard, with their steps."""
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        assert self.run
        events = accumulator.EventAccumulator(str(self.folder / "logs" / "tensorboard"))
        events.Reload()
        return {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}

    @property
    def files(self) -> set[str]:
        """The tensor files of the run's last checkpoint."""
        return {path.stem for path in (self.folder / "checkpoints" / "step-000002").glob("*.safetensors")}

    def saved(self, part: str) -> bool:
        """Whether the run's checkpoints have this folder."""
        assert self.run
        return (self.folder / "checkpoints" / part).is_dir()


# --------------------------------------------------------------------------- checks


def _clips(f: Facts) -> bool:
    """Whether the second pass over the same rows, whose ratios are not 1, feels the bound."""
    after: list[dict[str, torch.Tensor]] = []
    for eps_clip in (1e-6, 1.0):
        trainer = f.filled(eps_clip=eps_clip, max_epochs=2)
        trainer.ppo_train(1)
        after.append(weights(trainer))
    return distance(*after) > 1e-6


def _refuses(*names: object, **given: Any) -> Callable[[Facts], bool]:
    def check(f: Facts) -> bool:
        with refused(ConfigError, *names):
            f.trainer(**given)
        return True

    return check


def _moved(before: dict[str, torch.Tensor], after: Iterable[tuple[str, torch.Tensor]]) -> bool:
    return distance(before, dict(after)) > 0


def _passes(f: Facts, **given: Any) -> int:
    """The number of passes through a layer in one step of the actor."""
    trainer, seen = f.filled(**given), list[None]()
    layer = trainer.actor.language_model.module.get_decoder().layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: seen.append(None))
    trainer.training_step_actor(ExperienceVL.join(trainer.replay_buffer.items))
    return len(seen)


def _step_length(f: Facts, max_norm: float) -> float:
    """The norm of what a step of plain gradient descent adds to the weights, in learning rates."""
    trainer = f.filled(max_norm=max_norm)
    before = [parameter.detach().clone() for parameter in trainer.actor.model.parameters()]
    trainer.ppo_train(1)
    parts = [(a - b).flatten() for a, b in zip(trainer.actor.model.parameters(), before, strict=True)]
    return float(torch.cat(parts).detach().norm()) / 0.1


def _average(f: Facts) -> bool:
    """Whether the average follows each of four optimizer steps of a rollout."""
    trainer = f.filled({"train_batch_size": 2}, ema_model=ActorVL(f.model), ema_beta=0.75)
    expected, steps, step = dict(f.before), list[None](), trainer.actor_optim.step

    def watched(*given: Any, **named: Any) -> Any:
        result, now = step(*given, **named), weights(trainer)
        steps.append(None)
        expected.update({name: 0.75 * tensor + 0.25 * now[name] for name, tensor in expected.items()})
        return result

    trainer.actor_optim.step = watched
    trainer.ppo_train(1)
    return len(steps) == 4 and distance(expected, dict(trainer.ema_model.export_weights())) < 1e-6


def _newest(f: Facts) -> bool:
    kept, whole = (f.filled(buffer_limit=limit).replay_buffer.items for limit in (3, 0))
    return [item.sequences.tolist() for item in kept] == [item.sequences.tolist() for item in whole[-3:]]


def _micro_rollouts(f: Facts) -> bool:
    sizes: list[int] = []
    f.scored(
        5, reward_model=lambda queries: sizes.append(len(queries)) or [0.0] * len(queries), micro_rollout_batch_size=2
    )
    return sizes == [2, 2, 1]


def _longest_prompt(f: Facts) -> int:
    trainer = f.trainer(prompt_max_len=3)
    groups = trainer.experience_maker.generate(
        next(iter(loader(2, 2))), 0, purpose="train", version=0, samples=1, sampling=trainer.sampling
    )
    trainer.close()
    return max(len(member.turns[0].prompt_tokens) for group in groups for member in group.alive)


def _of_file(f: Facts) -> bool:
    (f.folder / "rewards.py").write_text("def reward_func(queries):\n    return [3.0] * len(queries)\n")
    return f.scored(remote_rm_url=str(f.folder / "rewards.py")) == [3.0, 3.0]


def _sampling(f: Facts, **given: Any) -> tuple[float, int]:
    sampling = f.trainer(**given).sampling
    return sampling.temperature, sampling.top_k


def _value_clip(f: Facts, value_clip: float) -> float | None:
    critic = CriticVL(f.model)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    trainer = f.trainer(PPO, critic=critic, critic_optim=optimizer, value_clip=value_clip)
    return critic_objective(trainer.algorithm).clip


def _map_given(f: Facts) -> bool:
    given: list[Any] = []

    def fn(models: Any, labels: Any, queries: Any, refs: Any, label_map: Any) -> Any:
        given.append(label_map)
        return [0.0] * len(queries)

    f.scored(reward_fn=fn, reward_fn_label_map={"rm": 0})
    return given == [{"rm": 0}]


def _only_hugging_face(f: Facts) -> bool:
    trainer = f.trainer(
        {"ckpt_path": str(f.folder / "other"), "save_steps": 1}, disable_ds_ckpt=True, save_hf_ckpt=True
    )
    trainer.save_logs_and_checkpoints(trainer.args, 1, None)
    return [path.name for path in (f.folder / "other").iterdir()] == ["global_step1_hf"]


def _continued(f: Facts) -> bool:
    trainer = f.trainer(cls=Watched)
    trainer.fit(trainer.strategy.args, loader(4, 2), None, consumed_samples=2)
    return trainer.arguments("ppo_train") == [(2,)]


def _evaluations(f: Facts, updates: int) -> list[int]:
    """The steps of four rollouts, with two updates each, at which `fit` evaluates."""
    trainer = f.trainer({"eval_steps": -1, "train_batch_size": 4}, Watched)
    trainer.fit(trainer.strategy.args, loader(8, 2), None, loader(2, 2), 0, updates)
    return [step for _, step in trainer.arguments("evaluate")]


def _mask_narrows(f: Facts, method: str) -> bool:
    after: list[dict[str, torch.Tensor]] = []
    for narrow in (False, True):
        trainer = f.filled()
        experience = ExperienceVL.join(trainer.replay_buffer.items)
        mask = torch.zeros_like(experience.action_mask)
        mask[:, 0] = True
        steps = () if method == "training_step_actor" else (1,)
        getattr(trainer, method)(experience, *steps, **({"entropy_mask": mask} if narrow else {}))
        after.append(weights(trainer))
    return distance(*after) > 1e-6


def _postfix(f: Facts) -> bool:
    class Bar:
        def set_postfix(self, shown: dict[str, float]) -> None:
            self.shown = shown

    bar, trainer = Bar(), f.trainer({"use_tensorboard": str(f.folder / "alone")})
    trainer.save_logs_and_checkpoints(trainer.args, 1, bar, {"policy_loss": 0.5})
    trainer.close()
    (events,) = (f.folder / "alone" / "tensorboard").iterdir()
    return bar.shown == {"policy_loss": 0.5} and b"train/policy_loss" in events.read_bytes()


def _client_states(f: Facts) -> dict[str, Any]:
    assert f.saved("step-000002")
    return json.loads((f.folder / "checkpoints" / "step-000002" / "state.json").read_text())["client_state"]


def _floats(statuses: list[Any], *names: str) -> bool:
    return all(all(isinstance(value, float) for value in s.values()) and {*names} <= {*s} for s in statuses)


STATUS = ["actor_lr", "kl", "reward", "return", "response_length", "total_length", "values", "critic_lr"]
T = PPOTrainerVL
SIGNATURES: dict[Callable[..., Any], str] = {
    T.__init__: "strategy, actor, critic, reward_model, initial_model, ema_model, actor_optim, critic_optim, "
    "actor_scheduler, critic_scheduler, ema_beta=0.992, init_kl_coef=0.001, kl_target=None, kl_horizon=10000, "
    "ptx_coef=0, micro_train_batch_size=8, buffer_limit=0, buffer_cpu_offload=True, eps_clip=0.2, value_clip=0.2, "
    "micro_rollout_batch_size=8, gradient_checkpointing=False, max_epochs=1, max_norm=1.0, tokenizer=None, "
    "processor=None, prompt_max_len=128, dataloader_pin_memory=True, remote_rm_url=None, reward_fn=None, "
    "reward_fn_label_map=None, reward_recipe=None, save_hf_ckpt=False, disable_ds_ckpt=False, **generate_kwargs",
    T.evaluate: "eval_dataloader, global_step",
    T.fit: "args, prompts_dataloader, pretrain_dataloader, eval_dataloader=None, consumed_samples=0, "
    "num_update_steps_per_episodes=1",
    T.ppo_train: "global_steps=0",
    T.save_logs_and_checkpoints: "args, global_step, step_bar, logs_dict={}, client_states={}, episode=0",
    T.training_step: "experience, global_steps, entropy_mask=None",
    T.training_step_actor: "experience, entropy_mask=None",
    T.training_step_critic: "experience",
}
"""Each method of the document."""

# --------------------------------------------------------------------------- the facts

Check = Callable[[Facts], Any]
FACTS: list[tuple[str, str, Check]] = [
    # what the arguments do
    ("strategy/use", "its args are the trainer's", lambda f: f.trainer({"save_steps": 17}).args.save_steps == 17),
    ("actor/use", "is trained", lambda f: _moved(f.before, f.run.actor.export_weights())),
    ("critic/use", "is trained", lambda f: _moved(f.critic_before, f.run.critic.value_model.state_dict().items())),
    ("critic/type", f"{REFUSED}a module without a linear head", _refuses("Linear", critic=torch.nn.Linear(2, 1))),
    (
        "reward_model/use",
        "gives the rewards",
        lambda f: f.scored(reward_model=lambda queries: [5.0, 6.0]) == [5.0, 6.0],
    ),
    (
        "initial_model/use",
        "is the reference, and frozen",
        lambda f: not _moved(f.before, f.run.initial_model.export_weights()) and f.status["kl"] != 0,
    ),
    ("ema_model/use", "follows the actor", lambda f: _moved(f.before, f.run.ema_model.export_weights())),
    (
        "actor_optim/use",
        "steps once an update",
        lambda f: {int(s["step"]) for s in f.run.actor_optim.state.values()} == {4},
    ),
    (
        "critic_optim/use",
        "steps once an update",
        lambda f: {int(s["step"]) for s in f.run.critic_optim.state.values()} == {4},
    ),
    ("actor_scheduler/use", "steps with its optimizer", lambda f: f.run.actor_scheduler.last_epoch == 4),
    ("critic_scheduler/use", "steps with its optimizer", lambda f: f.run.critic_scheduler.last_epoch == 4),
    ("ema_beta/use", "is the share that the average keeps", _average),
    ("init_kl_coef/use", "is the first coefficient", lambda f: f.trainer(init_kl_coef=0.3).kl_ctl.value == 0.3),
    ("kl_target/use", "makes the coefficient adaptive", lambda f: f.trainer(kl_target=0.5).kl_ctl.target == 0.5),
    (
        "kl_horizon/use",
        "is that of the adaptation",
        lambda f: f.trainer(kl_target=1.0, kl_horizon=7).kl_ctl.horizon == 7,
    ),
    (
        "ptx_coef/use",
        "weighs the loss of supervised rows",
        lambda f: (
            f.status["actor_loss"] - f.status["policy_loss"] == pytest.approx(0.5 * f.status["ptx_loss"], abs=1e-6)
        ),
    ),
    (
        "micro_train_batch_size/use",
        "bounds the rows of a pass",
        lambda f: [_passes(f, micro_train_batch_size=size) for size in (2, 8)] == [4, 1],
    ),
    ("buffer_limit/use", "keeps the newest", _newest),
    (
        "buffer_cpu_offload/use",
        "keeps rows in host memory",
        lambda f: f.filled().replay_buffer.items[0].sequences.device.type == "cpu",
    ),
    ("eps_clip/use", "bounds the ratio of an update", _clips),
    ("value_clip/use", "bounds how far a value moves", lambda f: _value_clip(f, 0.3) == 0.3),
    ("micro_rollout_batch_size/use", "bounds the rows that are scored together", _micro_rollouts),
    (
        "gradient_checkpointing/use",
        "computes layers again in the backward pass",
        lambda f: [_passes(f, gradient_checkpointing=on) for on in (False, True)] == [1, 2],
    ),
    (
        "max_epochs/use",
        "is the number of passes over the buffer",
        lambda f: len(f.run.results("training_step")) == 2 * 2,
    ),
    (
        "max_norm/use",
        "bounds the norm of the gradient",
        lambda f: _step_length(f, 1e-3) == pytest.approx(1e-3, rel=1e-2),
    ),
    ("tokenizer/use", "reads completions", lambda f: f.trainer().tokenizer is f.tokenizer),
    (
        "processor/use",
        "brings its tokenizer",
        lambda f: f.trainer(tokenizer=None, processor=f.tokenizer).tokenizer is f.tokenizer,
    ),
    ("prompt_max_len/use", "cuts longer prompts", lambda f: _longest_prompt(f) == 3),
    (
        "dataloader_pin_memory/use",
        "pins the buffer's rows with a GPU",
        lambda f: f.trainer().replay_buffer.pin_memory == torch.cuda.is_available(),
    ),
    ("remote_rm_url/use", "names a service, or a file with reward_func", _of_file),
    (
        "reward_fn/use",
        "gets a list of score tensors",
        lambda f: f.scored(reward_model=lambda queries: [1.0, 3.0], reward_fn=mean_of) == [1.0, 3.0],
    ),
    ("reward_fn_label_map/use", "is given to reward_fn", _map_given),
    (
        "reward_recipe/use",
        "names and weighs the rules of a label",
        lambda f: f.scored(reward_recipe={"math": [("gsm8k_rule", None, 2.0)]}) == [1.8, 1.8],
    ),
    ("save_hf_ckpt/use", "adds directories that transformers loads", lambda f: f.saved("global_step2_hf")),
    ("disable_ds_ckpt/use", "leaves out the checkpoints that runs resume from", _only_hugging_face),
    ("generate_kwargs/use", "sets the sampling", lambda f: _sampling(f, temperature=0.5, top_k=3) == (0.5, 3)),
    # evaluate
    ("evaluate/eval_dataloader", "holds the prompts", lambda f: f.run.results("evaluate")[0]["num_samples"] == 2),
    ("evaluate/global_step", "is where the result is logged", lambda f: f.logged["eval/reward_mean"] == [1, 2]),
    (
        "evaluate/returns",
        "metrics by name",
        lambda f: _floats(f.run.results("evaluate"), "reward_mean", "response_length_mean"),
    ),
    # fit
    ("fit/args/use", "says how often to save", lambda f: f.saved("step-000001")),
    (
        "fit/prompts_dataloader/use",
        "is a pass: two batches, two rollouts",
        lambda f: f.run.arguments("ppo_train") == [(1,), (2,)],
    ),
    ("fit/pretrain_dataloader/use", "adds a loss", lambda f: f.status["ptx_loss"] > 0),
    ("fit/eval_dataloader/use", "is evaluated", lambda f: [step for _, step in f.run.arguments("evaluate")] == [1, 2]),
    ("fit/consumed_samples/use", "skips what was trained on", _continued),
    (
        "fit/num_update_steps_per_episodes/use",
        "is the updates between evaluations",
        lambda f: (_evaluations(f, 1), _evaluations(f, 4)) == ([4], [2, 4]),
    ),
    ("fit/returns", "None", lambda f: f.run and f.returned is None),
    # ppo_train
    (
        "ppo_train/buffer",
        "trains on the buffer",
        lambda f: all(len(given[0]) == 8 for given in f.run.arguments("training_step")),
    ),
    ("ppo_train/override", "is called through self", lambda f: len(f.run.results("ppo_train")) == 2),
    (
        "ppo_train/returns",
        "means by name",
        lambda f: _floats(f.run.results("ppo_train"), "policy_loss", "critic_loss", "kl"),
    ),
    # save_logs_and_checkpoints
    (
        "save/episode",
        "is logged",
        lambda f: "train/episode" in f.logged,
    ),
    ("save/step_bar/use", "shows the metrics, outside of fit as well", _postfix),
    ("save/client_states/use", "are in the checkpoint", lambda f: _client_states(f)["consumed_samples"] == 4),
    (
        "save/logs/rollout",
        "statistics of rollouts are logged",
        lambda f: {"rollout/reward", "rollout/response_length"} <= f.logged.keys(),
    ),
    (
        "save/logs/train",
        "statistics of updates are logged",
        lambda f: (
            {"train/policy_loss", "train/critic_loss", "train/kl", "train/actor_lr"} <= f.logged.keys()
            and not {"train/reward", "train/return"} & f.logged.keys()
        ),
    ),
    (
        "save/checkpoints",
        "actor and critic are saved",
        lambda f: f.saved("step-000002") and {"policy", "critic"} < f.files,
    ),
    # the steps
    (
        "training_step/both",
        "updates actor and critic",
        lambda f: len(f.run.results("training_step_actor")) == len(f.run.results("training_step_critic")) == 4,
    ),
    ("training_step/mask", "restricts the policy loss", lambda f: _mask_narrows(f, "training_step")),
    (
        "training_step/returns",
        "numbers by name",
        lambda f: _floats(f.run.results("training_step"), "policy_loss", "critic_loss", *STATUS),
    ),
    ("training_step_actor/mask", "restricts the policy loss", lambda f: _mask_narrows(f, "training_step_actor")),
    (
        "training_step_actor/returns",
        "numbers of the actor",
        lambda f: _floats(f.run.results("training_step_actor"), "policy_loss", "actor_lr"),
    ),
    (
        "training_step_critic/returns",
        "numbers of the critic",
        lambda f: _floats(f.run.results("training_step_critic"), "critic_loss", "values"),
    ),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return Facts(tmp_path_factory.mktemp("facts"))


@pytest.mark.parametrize(("wording", "check"), [fact[1:] for fact in FACTS], ids=[fact[0] for fact in FACTS])
def test_fact(facts: Facts, wording: str, check: Check) -> None:
    assert check(facts), wording


def test_every_fact_is_stated_once() -> None:
    assert len({fact[0] for fact in FACTS}) == len(FACTS)


@pytest.mark.parametrize("method", SIGNATURES, ids=lambda method: method.__name__)
def test_the_parameters_of(method: Callable[..., Any]) -> None:
    check_parameters(method, SIGNATURES[method])


def test_the_trainer_is_abstract_as_in_the_document() -> None:
    assert ABC in T.__bases__
