"""Routing replay: the experts of sampled tokens are recorded, travel, and are chosen again in training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import configured
from failing import refused
from moe_parts import batch_of, group_of, mixture, sampled, turn_of, write_mixture
from torch.nn.functional import linear
from training_parts import Parts, Reinforce, make_engine, write_model

from tests.float64 import differentiate_in_float64
from trivium.buffers.journal import Journal, decode_group, encode_group, read_stored, stored_record
from trivium.buffers.media import MediaFiles
from trivium.foundation.errors import ConfigError, DataError, TriviumError
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.packed import pack
from trivium.models.backbone.routing import _choice, routed, routers_of
from trivium.models.heads.trained_models import LanguageModel
from trivium.training.batching import prefixes_of
from trivium.types import (
    Batch,
    Experience,
    Group,
    Lease,
    Request,
    Sampling,
    StopReason,
    Turn,
    experiences_of,
)

PROMPT = np.arange(5, 30, dtype=np.int32)
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Group]:
    """A model, and a group of four that it sampled with its experts recorded."""
    model_dir = write_mixture(tmp_path_factory.mktemp("moe"))
    return model_dir, group_of(
        *[[turn_of(PROMPT, done)] for done in sampled(model_dir, [PROMPT] * 4, extra=("routing",))]
    )


def errors(model_dir: Path, batch: Batch, noise: float, **config: Any) -> np.ndarray:
    """How far the trainer's log-probabilities are from the engine's, with its routers disturbed."""
    engine = make_engine(model_dir, temperature=1.0, **config)
    torch.manual_seed(1)
    with torch.no_grad():
        for router in routers_of(engine._policy.module.base_model).modules:
            router.weight += noise * router.weight.std() * torch.randn_like(router.weight)
    scored = zip(engine.score(batch, "old"), batch.experiences, strict=True)
    return np.concatenate([np.abs(numbers - e.rollout_log_prob)[e.response_mask] for numbers, e in scored])


# --------------------------------------------------------------------------- recorded


def test_the_engine_records_what_the_routers_choose(rolled_out: tuple[Path, Group]) -> None:
    _, group = rolled_out
    (experience,) = experiences_of(group, group.trajectories[1])
    routing = experience.extra["routing"]
    assert routing.shape == (len(experience), 3, 2)
    assert routing.dtype == np.uint8
    assert not routing[-1].any(), "the last token went through no layer"
    model, chosen = mixture(), []
    for router in routers_of(model.base_model).modules:
        router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[-1]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(experience.tokens.astype(np.int64))[None])
    assert np.array_equal(routing[:-1], torch.stack(chosen, 1).numpy()[:-1] + 1)


def test_requests_that_do_not_ask_get_nothing(tmp_path: Path) -> None:
    model_dir = write_mixture(tmp_path)
    assert all(not done.extra for done in sampled(model_dir, [PROMPT] * 2))


def test_a_later_turn_keeps_what_the_earlier_one_was_sampled_with() -> None:
    first = Turn([5, 6], [7, 8], [-1.0, -1.0], [0, 0], StopReason.EOS, "", extra={"routing": numbered(1, 2, 3, 0)})
    more = {"routing": numbered(9, 9, 9, 4, 5, 6, 0)}
    second = Turn([5, 6, 7, 8, 9], [10, 11], [-1.0, -1.0], [0, 0], StopReason.EOS, "", extra=more)
    group = group_of([first, second])
    (experience,) = experiences_of(group, group.trajectories[0])
    assert experience.extra["routing"][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 0]


def numbered(*numbers: int) -> np.ndarray:
    return np.tile(np.array(numbers, np.uint8)[:, None, None], (1, 2, 2))


# --------------------------------------------------------------------------- travels


def test_every_store_keeps_it_and_old_records_are_read(rolled_out: tuple[Path, Group], tmp_path: Path) -> None:
    _, group = rolled_out
    store, journal = MediaFiles(tmp_path / "media"), Journal(tmp_path / "rollouts")
    journal.append(1, group)
    copies = [
        decode_group(encode_group(group)),
        read_stored(stored_record(group, "b", store), "b", Lease(0), store),
        *journal.read(0),
    ]
    expected = [turn.extra["routing"] for turn in group.turns()]
    for each in copies:
        read = [turn.extra["routing"] for turn in each.turns()]
        assert all(
            np.array_equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(read, expected, strict=True)
        )
    plain = group_of([replace(turn, extra={}) for turn in group.trajectories[0].turns])
    assert b"routing" not in encode_group(plain), "records without it are as they always were"
    assert next(decode_group(encode_group(plain)).turns()).extra == {}


# --------------------------------------------------------------------------- replayed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_when_told_its_own_choice(family: str, tmp_path: Path) -> None:
    latent: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
    model = mixture(family, **latent if family == "deepseek_v3" else {})
    routers, chosen = routers_of(model.base_model), []
    assert (routers.chosen, routers.experts) == (2, 8)
    language_model = LanguageModel(model, dtype=torch.float32, device=torch.device("cpu"), temperature=1.0)
    tokens = np.random.default_rng(0).integers(3, 40, 30).astype(np.int32)
    packed = pack([tokens])
    rows = torch.arange(1, 30)
    hooks = [
        r.register_forward_hook(lambda _, __, outputs: chosen.append(_choice(outputs)[:30])) for r in routers.modules
    ]
    with torch.no_grad():
        free = language_model(packed, rows)[0]
    for hook in hooks:
        hook.remove()
    own = torch.stack(chosen).permute(0, 2, 1).to(torch.int16) + 1
    language_model.replay_routing()
    with torch.no_grad():
        assert torch.equal(language_model(packed, rows)[0], free)
        assert torch.equal(language_model(replace(packed, routing=own), rows)[0], free)
        other = language_model(replace(packed, routing=(own + 1) % 8 + 1), rows)[0]
    assert (other - free).abs().max() > 1e-3


def test_dense_models_are_refused_by_name(tmp_path: Path) -> None:
    with refused(ConfigError, "Qwen3Model"):
        make_engine(write_model(tmp_path), router_replay="rollout")


def test_a_model_that_does_not_pack_is_refused_by_name() -> None:
    language_model = LanguageModel(mixture(), dtype=torch.float32, device=torch.device("cpu"), temperature=1.0)
    language_model.replay_routing()
    language_model.backbone.packs = False
    packed = replace(pack([PROMPT]), routing=torch.zeros(3, 2, len(PROMPT), dtype=torch.int16))
    with refused(ConfigError, "Qwen3MoeModel"):
        language_model(packed, torch.arange(1, 5))


def test_replay_brings_disturbed_routers_close_to_the_engine(rolled_out: tuple[Path, Group]) -> None:
    """With the engine's weights the ratio is one to rounding. With routers that differ as by another arithmetic some
    tokens go through other experts, which replay undoes; the experts' weights still differ."""
    model_dir, group = rolled_out
    batch = batch_of(group)
    assert errors(model_dir, batch, 0.0, router_replay="rollout").max() < 1e-5
    free, replayed = (errors(model_dir, batch, 0.05, router_replay=mode) for mode in ("off", "rollout"))
    assert free.max() > 2 * replayed.max()
    assert free.mean() > 2 * replayed.mean()


def slow_log_probs(model: Any, experience: Experience) -> torch.Tensor:
    """Token after token through the recorded experts, by the definition: of the router's probabilities those of the
    recorded experts, normalised."""
    routing = torch.from_numpy(experience.extra["routing"].astype(np.int64))
    for layer, decoder_layer in enumerate(model.model.layers):
        decoder_layer.mlp.forward = partial(slow_mixture, decoder_layer.mlp, routing[:, layer])
    tokens = torch.from_numpy(experience.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    return (logits / 0.8).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def slow_mixture(mlp: Any, routing: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    outputs = []
    for state, recorded in zip(hidden[0], routing, strict=True):
        probabilities = linear(state, mlp.gate.weight).softmax(-1)
        experts = recorded - 1 if recorded.all() else probabilities.topk(2).indices
        weights = probabilities[experts] / probabilities[experts].sum()
        parts = []
        for expert in experts.tolist():
            gate, up = linear(state, mlp.experts.gate_up_proj[expert]).chunk(2)
            parts.append(linear(torch.nn.functional.silu(gate) * up, mlp.experts.down_proj[expert]))
        outputs.append((weights[:, None] * torch.stack(parts)).sum(0))
    return torch.stack(outputs)[None]


@pytest.mark.parametrize(("share_prefix", "checkpointing"), [(False, False), (True, True)])
def test_the_gradient_is_that_of_a_slow_loop(
    share_prefix: bool, checkpointing: bool, rolled_out: tuple[Path, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, group = rolled_out
    # Other experts than the routers choose; all but the last of the group share those of the prompt, which that one
    # had read by itself, perhaps by another version.
    rng = np.random.default_rng(0)
    prompt, batch = rng.integers(1, 8, (25, 3, 1)), batch_of(group)
    routed: list[Experience] = []
    for number, e in enumerate(batch.experiences):
        own = prompt if number + 1 < len(batch) else rng.integers(1, 8, prompt.shape)
        first = np.concatenate([own, rng.integers(1, 8, (len(e) - 25, 3, 1))])
        routing = np.concatenate([first, first + 1], -1).astype(np.uint8)
        routing[-1] = 0
        routed.append(replace(e, extra={"routing": routing}))
    batch = Batch(tuple(routed))
    how: dict[str, Any] = {"share_prefix": share_prefix, "gradient_checkpointing": checkpointing}
    engine = make_engine(model_dir, Parts((Reinforce(),)), dtype="float64", router_replay="rollout", **how)
    learner, seen = engine._learner("policy"), {}
    monkeypatch.setattr(
        type(learner.optimizer),
        "step",
        lambda self, *_: seen.update({n: p.grad.clone() for n, p in self.parameters.items()}) or 0.0,
    )
    advantages = [np.linspace(-1, 1, len(e)) for e in batch.experiences]
    engine.update("policy", batch.with_columns(advantages=advantages), Reinforce(entropy_coef=0.0))
    slow = mixture().double()
    differentiate_in_float64(slow)
    slow.set_experts_implementation("eager")
    total = sum(e.num_response_tokens for e in batch.experiences)
    for e, advantage in zip(batch.experiences, advantages, strict=True):
        mask = torch.from_numpy(e.response_mask[1:].copy())
        loss = -(slow_log_probs(slow, e) * torch.from_numpy(advantage)[1:])[mask].sum() / total
        loss.backward()
    for name, parameter in slow.named_parameters():  # transformers rounds the router's probabilities to float32
        torch.testing.assert_close(
            seen[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_prefixes_are_shared_where_experts_are_the_same(rolled_out: tuple[Path, Group]) -> None:
    _, group = rolled_out
    batch = batch_of(group)
    rows = range(len(batch))
    saved = sum(map(len, batch.experiences)) - prefixes_of(batch, routed=True).tree(rows).num_tokens
    assert saved >= 3 * len(PROMPT)
    routing = batch.experiences[0].extra["routing"].copy()
    routing[3] = routing[3] % 8 + 1
    other = Batch((replace(batch.experiences[0], extra={"routing": routing}), *batch.experiences[1:]))
    assert prefixes_of(other, routed=True).tree(rows).num_tokens >= prefixes_of(batch).tree(rows).num_tokens + 20


def test_sequences_without_experts_and_those_of_another_model_are_refused(rolled_out: tuple[Path, Group]) -> None:
    model_dir, group = rolled_out
    batch = batch_of(group)
    engine = make_engine(model_dir, router_replay="rollout")
    bare = Batch((replace(batch.experiences[0], extra={}), *batch.experiences[1:]))
    with refused(DataError, "train.router_replay", "1 of 4"):
        engine.score(bare, "old")
    wide = replace(batch.experiences[0], extra={"routing": batch.experiences[0].extra["routing"] + np.uint8(9)})
    with refused(DataError, "8 experts"):
        engine.score(Batch((wide,)), "old")


def test_layers_without_experts_are_left_out_of_what_another_engine_returns(tmp_path: Path) -> None:
    """vLLM's array has all layers, no last token, and what it sampled beyond a stop string."""
    model = mixture(mlp_only_layers=[1])
    routers = routers_of(model.base_model)
    assert routers.numbers == (0, 2)
    experts = np.arange(7 * 3 * 2, dtype=np.uint8).reshape(7, 3, 2) % 8
    request = Request(np.array([5, 6, 7], np.int32), Sampling(9), SampleKey(0, "train", "train", "a"))
    recorded = routed(experts, request, 3)
    assert recorded.shape == (6, 3, 2)
    assert np.array_equal(recorded[:5], experts[:5] + 1)
    assert not recorded[5].any()
    packed = routers.packed([recorded], pack([np.arange(6, dtype=np.int32)]).segments)
    assert packed is not None
    assert np.array_equal(packed.numpy(), recorded[:, [0, 2]].transpose(1, 2, 0))
    with refused(TriviumError, "engine.options.enable_return_routed_experts"):
        routed(None, request, 3)


def test_check_says_what_is_missing() -> None:
    with refused(ConfigError) as error:
        configured(train={"router_replay": "rollout"}, engine={"kind": "scripted"})
    assert {problem.found for problem in error.value.problems if problem.where == "train.router_replay"} == {
        "the model has no experts",
        "engine.kind 'scripted' does not record them",
    }
